//! How ranks talk: threads in one process, or processes over TCP.
