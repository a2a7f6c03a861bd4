"""`ringtrain doctor`: checks hosts before a job starts.

preflight: probes every host, and prints what each check found, or JSON
visit:     the conversation with one host
probe:     the program that runs on a host; sent to it as source, standard library only
software:  checks of Python, packages, ringtrain, the folder and MPI: fact, rule and fix
machine:   checks of GPUs, cores, memory, disk and limits
network:   checks of ssh, names and subnets
findings:  data classes; cells and findings, with the commands that fix them
"""
