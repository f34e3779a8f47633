"""The operator: PDCluster objects in, pools and a router out."""
