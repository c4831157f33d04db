"""Looking at the tiers: scraping engines, hit rates with their ages. Missing is unknown, never zero."""
