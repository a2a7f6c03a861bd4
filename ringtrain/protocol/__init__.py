"""Messages between launcher and ranks, and the formats they share. Standard library only; both sides import it.

env:           RINGTRAIN_* environment variables, and the shell line that each rank starts with
cores:         cores of a host, and the share of a rank in them
for_script:    what a command tells the scripts that it starts, such as options of `ringtrain.fit`
launchers:     environment variables of each launcher with rank, size and local rank
placement:     actual and planned placement of ranks, and the difference
failures:      reports of a rank to its launcher on stderr: process, run, failure
reader:        the launcher's parser of these reports
status:        status line of a rank (step and phase) in shared memory, for its host agent and other ranks
attempt:       number of this attempt, and exit causes of earlier ones
as_main:       runs a script in this process as `python` would
mpi_world:     MPI without Horovod: initialized once, finalized if the process succeeds
transport:     heartbeats as JSON over TCP, behind a token
json_text:     JSON from files and other processes, or ValueError
services:      Horovod's network services, restricted to one address
lazy:          names of a package whose modules are imported when a name is used
"""
