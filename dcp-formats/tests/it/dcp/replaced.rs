//! Files that are replaced while they are read.

use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::error::{FailureKind, error_chain};
use dcp_core::storage::{PutMode, StorageExt as _};
use dcp_core::{DType, Storage, StorageErrorKind, StorageReader as _};
use dcp_formats::dcp::{DcpFormat, DcpReader, DcpWriter};

use crate::harness::{State, block_on, key, load, load_with, save};

/// The bytes are those of before: only the version differs.
#[test]
fn a_data_file_that_is_replaced_between_two_reads_is_named() {
    let state = State::new(1).rows("w", DType::Float32, &[40, 30], 3).object("step", 7);
    let data = key("__0_0.distcp");
    // A file keeps the version that was listed when the checkpoint was opened, or that of a read.
    for (listed, loaded) in [(false, false), (false, true), (true, true)] {
        let storage = Arc::new(MemoryStorage::new());
        save(&DcpWriter::new(storage.clone()), &state).unwrap();
        let shared: Arc<dyn Storage> = storage.clone();
        let opened = if listed {
            let formats = dcp_core::format::FormatRegistry::empty().with(Arc::new(DcpFormat));
            Arc::clone(block_on(formats.look(&shared)).unwrap().storage())
        } else {
            shared
        };
        let reader = DcpReader::new(opened);
        block_on(reader.metadata()).unwrap();
        if loaded {
            load_with(&reader).unwrap();
        }
        let bytes = block_on(storage.read_all(&data)).unwrap();
        block_on(storage.put(&data, bytes.into(), PutMode::Overwrite)).unwrap();
        let error = load_with(&reader).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Storage(StorageErrorKind::Changed), "{error}");
        let text = error_chain(&error);
        assert!(
            text.contains("__0_0.distcp") && text.contains("open the checkpoint again"),
            "{text}"
        );
        load(storage).unwrap();
    }
}
