//! What is fuzzed: what another rank says about its shards.

use dcp_megatron::sharded::{Description, validate_sharding_integrity};

/// Reads a description, checks it with itself, and writes it again.
pub(crate) fn shards(bytes: &[u8]) {
    let Ok(description) = Description::from_wire(bytes) else { return };
    drop(validate_sharding_integrity(&[description.clone(), description.clone()]));
    let again = Description::from_wire(&description.to_wire());
    assert_eq!(again.as_ref(), Ok(&description), "what is written comes back");
}
