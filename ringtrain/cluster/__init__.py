"""Launch half: from a hostfile to ranks on every host. No TensorFlow; it runs on a login node.

hosts:          hostfiles of every format; distribution of ranks over slots; --include, --exclude
schedulers:     hosts from Slurm, LSF, PBS and Kubernetes
launch:         `ringtrain launch`: options -> hosts -> job -> plan -> supervised attempts
launch_options: every option of launch, once
job:            Job (what to run where) and Plan (flags with reasons, environment, files): plain values
environment:    variables of the launching environment that reach ranks
plans:          the command line of each launcher
horovod_driver: horovodrun with its network services restricted to the job
rank_process:   a process that horovodrun starts: output, exit code, and the signal that ends it
rsync:          `--sync`: the project and the environment for all hosts, by rsync
supervisor:     runs a plan and supervises it: placement, output, first failure, clean-up
agents:         host agents at the launcher: processes, connections and messages
output:         output of a launcher and its ranks, without the reports in it
processes:      starts programs, and writes a plan's files
host_agent:     a shell script on every host that forwards signals and cleans up
exit_cause:     why a job ended, and its exit code
restart:        whether a failed job runs again, when, and on which of its hosts
elastic:        a job whose hosts join and leave, and its slots for Horovod's elastic driver
doctor:         checks every host before a job
spark:          Spark's executors as hosts
"""
