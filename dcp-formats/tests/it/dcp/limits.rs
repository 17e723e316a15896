//! Saves on storages with limits, and the requests that a save makes.

use std::sync::Arc;

use dcp_conformance::{CountingStorage, MemoryStorage};
use dcp_core::error::FailureKind;
use dcp_core::storage::{Capabilities, WriteLimits};
use dcp_core::{DType, Storage as _, StorageErrorKind};
use dcp_formats::dcp::DcpWriter;

use crate::harness::{State, block_on, load, names, save, save_in_segments};

const MIB: u64 = 1 << 20;

fn limited(change: impl FnOnce(&mut WriteLimits)) -> MemoryStorage {
    let mut capabilities: Capabilities = MemoryStorage::new().capabilities();
    change(&mut capabilities.write_limits);
    MemoryStorage::new().with_capabilities(capabilities)
}

/// 3 MiB of one tensor, and some small ones.
fn state(seed: u8) -> State {
    State::new(1)
        .rows("large", DType::UInt8, &[3, MIB], seed)
        .rows("small", DType::BFloat16, &[5, 3], seed)
        .object("step", i64::from(seed))
}

/// Parts of one length but for the last, as many as are allowed and no shorter than allowed: the
/// storage refuses others.
#[test]
fn parts_are_as_the_storage_wants_them() {
    for (min, preferred, parts_max) in
        [(1, MIB / 3, 10_000), (MIB, 1, 10_000), (1, 7, 20), (1, 1000, 3), (5 * MIB, MIB, 2)]
    {
        let storage = limited(|limits| {
            limits.part_bytes_min = min;
            limits.part_bytes = preferred;
            limits.parts_max = parts_max;
        });
        let counting = CountingStorage::new(Arc::new(storage));
        let writer = DcpWriter::new(Arc::new(counting.clone()));
        block_on(save_in_segments(&writer, &state(1), 100_000)).unwrap();
        let parts = counting.counts().parts;
        assert!((1..=u64::from(parts_max)).contains(&parts), "{parts} of {parts_max}");
        assert!(load(Arc::new(counting)).is_ok());
    }
}

#[test]
fn a_file_that_is_too_long_for_the_storage_is_refused_before_a_byte_is_written() {
    let storage = Arc::new(limited(|limits| limits.object_bytes_max = MIB));
    let counting = CountingStorage::new(storage.clone());
    let writer = DcpWriter::new(Arc::new(counting.clone()));
    let error = block_on(save_in_segments(&writer, &state(1), 100_000)).unwrap_err();
    assert_eq!(error.kind(), FailureKind::Storage(StorageErrorKind::TooLarge), "{error}");
    let text = dcp_core::error::error_chain(&error);
    assert!(text.contains("__0_0.distcp") && text.contains("at most 1048576"), "{text}");
    assert_eq!((counting.counts().bytes_written, counting.counts().uploads), (0, 0));
    assert!(names(&*storage).is_empty());
}

/// What a storage returns of a write is not requested again.
#[test]
fn a_save_asks_for_no_file_that_it_wrote() {
    let tensors = (0..20).fold(State::new(1), |state, number| {
        state.rows(&format!("tensor {number}"), DType::Float32, &[4, 100], number)
    });
    let counting = CountingStorage::new(Arc::new(MemoryStorage::new()));
    let writer = DcpWriter::new(Arc::new(counting.clone()));
    save(&writer, &tensors).unwrap();
    let first = counting.reset();
    save(&writer, &tensors).unwrap();
    let second = counting.reset();
    println!("{first:?}\n{second:?}");
    assert_eq!((first.stats, second.stats), (0, 0));
    assert_eq!((first.lists, first.folder_lists), (0, 1));
    // The data file, the sidecar and the index.
    assert_eq!((first.puts, first.uploads), (3, 0));
    assert_eq!((second.deletes, second.deleted_keys), (1, 2));
}
