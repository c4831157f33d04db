"""What the host has and gives: inventory, hugepages, ports. Reads freely; only ``hugepages`` changes anything."""
