"""Launch half: from a hostfile to ranks on every host. No TensorFlow; it runs on a login node.

hosts:          hostfiles of every format; ranks dealt out over slots; --include, --exclude
schedulers:     hosts from Slurm, LSF, PBS and Kubernetes
job:            Job (what to run where) and Plan (flags with reasons, environment, files): plain values
environment:    what of the launching environment reaches ranks
plans:          the command line of each launcher
horovod_driver: horovodrun with its network services restricted to the job
supervisor:     runs a plan and stays with it: placement, output, first failure, clean-up
processes:      starts programs, and writes a plan's files
host_agent:     a shell on every host that passes signals on and ends what is left
exit_cause:     why a job ended, and its exit code
restart:        restarts a failed job from its newest checkpoint, on the hosts that still answer
elastic:        a job whose hosts come and go
doctor:         checks every host before a job
spark:          Spark's executors as hosts
"""
