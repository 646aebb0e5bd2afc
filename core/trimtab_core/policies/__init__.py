"""Policies: how good each slot is for a request. One policy per module, all of one form."""
