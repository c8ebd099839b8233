"""From a job to a run and back: submit, refresh the status, resume, cancel."""
