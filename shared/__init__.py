"""What every part needs: errors, settings, requests, events, history, logging, queues, and the store."""
