"""Launch half: from a hostfile to ranks on every host. No TensorFlow; it runs on a login node.

hosts:          hostfiles of every format; distribution of ranks over slots; --include, --exclude
schedulers:     hosts from Slurm, LSF, PBS and Kubernetes
job:            Job (what to run where) and Plan (flags with reasons, environment, files): plain values
environment:    variables of the launching environment that reach ranks
plans:          the command line of each launcher
horovod_driver: horovodrun with its network services restricted to the job
supervisor:     runs a plan and supervises it: placement, output, first failure, clean-up
processes:      starts programs, and writes a plan's files
host_agent:     a shell script on every host that forwards signals and cleans up
exit_cause:     why a job ended, and its exit code
restart:        restarts a failed job from its newest checkpoint, on the hosts that still answer
elastic:        a job whose hosts join and leave
doctor:         checks every host before a job
spark:          Spark's executors as hosts
"""
