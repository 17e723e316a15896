//! Conformance suites and fault-injecting decorators for dcp plug-ins.
