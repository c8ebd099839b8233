"""Every command of the sandbox that is not harmless: it does nothing, and records what it would have started.

Commands that start others (srun, mpirun, ssh, torchrun, …) start these, once for each task or rank, with the variables
that they set. What comes out at the end, a Python or a program, is recorded as a rank, and not started. allranks' own
supervisor and agent are recorders here too, so that the job file's side is what its plan starts.

It is copied into the sandbox, with ``system/hostlist.py``, and nothing else of allranks. A script may start it hundreds
of times: ``subprocess`` is imported only where it is used, and ``typing`` and ``pathlib`` nowhere.
"""
