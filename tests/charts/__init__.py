"""What the chart renders, without a cluster. tests/cluster/test_chart.py installs it."""
