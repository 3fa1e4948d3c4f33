"""MLflow: the tracking process, the kernel's end of it, and the hook on the ranks. The only user of MLflow."""
