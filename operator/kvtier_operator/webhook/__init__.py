"""Admission: attaches pods and validates policies, answering from caches alone."""
