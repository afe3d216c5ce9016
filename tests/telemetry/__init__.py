"""What Prometheus, OpenTelemetry and Grafana see."""
