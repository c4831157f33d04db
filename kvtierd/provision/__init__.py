"""From a settings file to the plan of this host, and the plan's parts carried out: shared by daemon and kvtierctl."""
