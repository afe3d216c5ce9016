"""Tests of what Prometheus, OpenTelemetry and Grafana see."""
