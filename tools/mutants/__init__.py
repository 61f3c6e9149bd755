"""Faults in the code: does a test notice?"""
