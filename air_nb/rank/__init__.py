"""The only code of ours inside a rank: environment, stdio, shell, values. Never imports widgets, MLflow's client or NVML."""
