"""Start runs on a cluster: health checks, and Slurm jobs from the templates in launch/."""
