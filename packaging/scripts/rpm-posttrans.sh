# After an installation nothing runs and nothing happens; after an upgrade or a downgrade all files are the new ones.
restart_daemon
