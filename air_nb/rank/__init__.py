"""The only code of ours inside a rank: environment, stdio, shell, values. No widgets, MLflow client or NVML."""
