"""Data only: settings, the model catalog, Prometheus, Grafana. A package so that an installed monoloop finds it."""
