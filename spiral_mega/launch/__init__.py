"""Starting runs on a cluster: health checks, and Slurm scripts from the templates in launch/."""
