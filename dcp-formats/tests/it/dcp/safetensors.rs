//! safetensors files of the library are read, and files like them are written.

use std::sync::Arc;

use bytes::Bytes;
use dcp_conformance::MemoryStorage;
use dcp_core::StorageErrorKind;
use dcp_formats::safetensors::{Header, PREFIX_LEN, SafetensorsItem, header_len, write};
use indexmap::IndexMap;

use crate::harness::{Source, block_on, get, key, names};
use crate::support;

fn split(image: &Bytes) -> (Header, Bytes) {
    let json_len = header_len(image, image.len() as u64).unwrap();
    let start = (PREFIX_LEN + json_len) as usize;
    let data = image.slice(start..);
    (Header::parse(&image[PREFIX_LEN as usize..start], data.len() as u64).unwrap(), data)
}

/// The library's own files, rewritten: the order of keys in the header is an accident of the
/// library, the order of the data is not.
#[test]
fn f18_files_of_the_library_come_back() {
    for name in support::names() {
        let path = support::root().join(&name).join("expected.safetensors");
        let theirs = Bytes::from(std::fs::read(path).unwrap());
        let (header, data) = split(&theirs);
        let mut items = Vec::new();
        let mut bytes = Vec::new();
        for (name, info) in header.tensors() {
            items.push(SafetensorsItem {
                name: Arc::clone(name),
                dtype: info.dtype,
                shape: info.shape.clone(),
            });
            let range = info.byte_range.start as usize..info.byte_range.end as usize;
            bytes.push(data.slice(range));
        }
        let storage = MemoryStorage::new();
        let source = Arc::new(Source { items: bytes, segment: 100 });
        let file = key("model.safetensors");
        let metadata = header.metadata().clone();
        block_on(write(&storage, &file, &items, &metadata, source.clone(), None)).unwrap();
        let (written, written_data) = split(&get(&storage, file.as_str()));
        assert_eq!(written, header, "{name}");
        assert!(written_data == data, "{name}");

        let again = block_on(write(&storage, &file, &items, &IndexMap::new(), source, None));
        let Err(dcp_core::CheckpointError::Storage(error)) = again else { panic!("overwritten") };
        assert_eq!(error.kind(), StorageErrorKind::AlreadyExists);
        assert_eq!(names(&storage).len(), 1);
    }
}
