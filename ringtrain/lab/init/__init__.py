"""`ringtrain init`: a first configuration and job.

cli: the command, and the commented configuration
job: the job file, which is copied as it stands here
"""
