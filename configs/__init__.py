"""Data only: settings, model catalog, Prometheus, Grafana. A package, so that it is found when installed."""
