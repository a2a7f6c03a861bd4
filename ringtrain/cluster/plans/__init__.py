"""Command lines: each launcher's flags with their reasons, as pure functions from a Job to a Plan.

They raise LaunchError for a job that the launcher cannot run, or not as asked for.

mpirun:     the command line of mpirun, with the flags of the MPI that it is (openmpi, hydra)
openmpi:    flags of Open MPI 4 and 5
hydra:      flags of MPICH and Intel MPI
horovodrun: horovodrun over MPI, over Gloo, and elastic
slurm:      srun, and a script for sbatch
kubernetes: manifests of an MPIJob and a TrainJob
rank_start: arguments before a rank's command: the report of its placement, and a log per rank
"""
