//! Parts of a pickle written again.

use dcp_core::{FormatError, Value};
use dcp_formats::pickle::{Limits, Node, NodeId, PersistentSink, Pickle, Writer};
use dcp_formats::torch_object::{decode_object, encode_object};
use dcp_formats::torch_zip::{ArchiveIndex, ParseStep, Sparse};

use crate::torch_save::reading::{fixture, load, root};

/// Writes references to storages as they were.
struct Same;

impl PersistentSink for Same {
    fn persistent(
        &mut self,
        writer: &mut Writer,
        pickle: &Pickle<'_>,
        id: NodeId,
    ) -> Result<(), FormatError> {
        let Node::Persistent(pid) = *pickle.node(id) else { panic!("{id:?}") };
        let [_, class, key, location, numel] = pickle.tuple(pid) else { panic!("{id:?}") };
        let class = pickle.global_name(*class).unwrap();
        let (key, location) = (pickle.str(*key).unwrap(), pickle.str(*location).unwrap());
        writer.storage(class, key, location, pickle.int(*numel).unwrap() as u64);
        Ok(())
    }
}

fn pickle_of(name: &str, file: &str) -> Vec<u8> {
    let bytes = std::fs::read(root().join(name).join(file)).unwrap();
    let blob = Sparse::whole(&bytes);
    let index = ArchiveIndex::parse(&blob).and_then(ParseStep::ready).unwrap();
    let record = index.require("data.pkl").unwrap().locate(&blob).unwrap().ready().unwrap();
    bytes[record.data.start as usize..record.data.end as usize].to_vec()
}

#[test]
fn pickles_of_pytorch_come_out_byte_for_byte() {
    for (name, file) in [("t215", "zip.pt"), ("t21", "zip.pt"), ("kinds", "zip.pt")] {
        let bytes = pickle_of(name, file);
        let pickle = Pickle::parse(&bytes, &Limits::DEFAULT).unwrap();
        let mut writer = Writer::new();
        writer.graph(&pickle, pickle.root(), &mut Same).unwrap();
        let again = writer.finish().unwrap();
        let differs = again.iter().zip(&bytes).position(|(a, b)| a != b);
        assert_eq!((differs, again.len()), (None, bytes.len()), "{name}/{file}");
    }
}

#[test]
fn objects_taken_out_of_a_file_are_whole_archives() {
    for file in ["zip.pt", "legacy.pt", "zip_proto5.pt"] {
        let loaded = load(&fixture("kinds", file)).unwrap();
        for (fqn, value) in &loaded.objects {
            let encoded = encode_object(value).unwrap();
            let again = decode_object(&encoded).unwrap_or_else(|e| panic!("{fqn}: {e:?}"));
            match (value, &again) {
                (Value::Opaque(a), Value::Opaque(b)) => {
                    assert_eq!(format!("{:?}", a.view), format!("{:?}", b.view), "{file}: {fqn}");
                    let twice = encode_object(&again).unwrap();
                    assert_eq!(twice, encoded, "{file}: {fqn}");
                }
                (a, b) => assert!(a.same(b), "{file}: {fqn}: {a:?} {b:?}"),
            }
        }
    }
}
