"""Shared measurements. Each takes what it measures as an argument, so that a control can hand it something broken."""
