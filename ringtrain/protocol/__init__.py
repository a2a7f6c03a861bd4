"""What launcher and ranks tell each other, and the formats they share. Standard library only; both halves import it.

env:           RINGTRAIN_* environment variables, and the shell line that each rank starts with
placement:     where ranks are, where they were planned to be, and the difference
failures:      what a rank tells its launcher on stderr: its process, its run, why it ends
reader:        the launcher's side of that
status:        the step a rank is at, in shared memory
attempt:       which start of a job this is, and why earlier ones ended
launcher_args: what a bare horovodrun or mpirun was told, read from its command line
mpi_world:     MPI without Horovod: started once, finalized if the process ends well
transport:     heartbeats as JSON lines over TCP, behind a token
json_text:     JSON from files and other processes, or ValueError
plain_pickle:  unpickles plain values alone, for Horovod's elastic services
"""
