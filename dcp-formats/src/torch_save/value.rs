//! Encodes any value as a whole archive, and decodes it.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::value::Opaque;
use dcp_core::{FormatError, Value};

use super::compose::{StorageContent, Storages};
use crate::pickle::{Node, NodeId, Pickle, ReplacedObject, Writer};
use crate::torch_object::decode_object;
use crate::torch_zip::{ArchiveEncoder, ArchiveIndex, RecordSet, Sparse};

/// The root folder of an archive that PyTorch writes to a stream.
const STREAM_ROOT: &str = "archive";

/// Encodes a value as `torch.save` does, with its records in the folder `root`: the file name
/// without its last extension, or `archive` when PyTorch writes to a stream.
///
/// Unlike [`encode_object`](crate::torch_object::encode_object) it accepts opaque values within
/// other data, and copies them out of their archives. An opaque value that is the whole value, in
/// an archive with that root, keeps its bytes.
///
/// # Errors
///
/// When the value contains a tensor that is not fully in memory, an opaque value with a damaged
/// archive, or a value that [`Writer::value`] cannot write.
pub fn encode_value(value: &Value, root: &str) -> Result<Bytes, FormatError> {
    if let Value::Opaque(opaque) = value {
        let index = ArchiveIndex::read(&Sparse::whole(&opaque.encoded));
        if index.is_ok_and(|index| index.root() == root) {
            return Ok(opaque.encoded.clone());
        }
    }
    archive(root, |writer, storages| writer.value(value, storages))
}

/// Decodes the item of a list of one, in which Megatron-Core wraps every object, as
/// [`decode_object`] decodes it alone.
///
/// # Errors
///
/// When the archive or the pickle is damaged, or contains anything but a list of one.
pub fn decode_only_item(blob: &Bytes) -> Result<Value, FormatError> {
    let (mut items, plain) = match decode_object(blob)? {
        Value::List(items) => (items, true),
        Value::Opaque(opaque) => match &opaque.view {
            Value::List(items) => (items.clone(), false),
            other => return Err(no_list_of_one(other.kind())),
        },
        other => return Err(no_list_of_one(other.kind())),
    };
    let (Some(view), true) = (items.pop(), items.is_empty()) else {
        return Err(no_list_of_one("list of another length"));
    };
    if plain {
        return Ok(view);
    }
    let encoded =
        archive(STREAM_ROOT, |writer, storages| storages.splice(writer, blob, only_item))?;
    // Alone it may be plain: its shared part may have been shared with the list only.
    match decode_object(&encoded)? {
        Value::Opaque(_) => Ok(Value::Opaque(Arc::new(Opaque { encoded, view }))),
        plain => Ok(plain),
    }
}

fn only_item(pickle: &mut Pickle<'_>) -> Result<NodeId, FormatError> {
    match pickle.node(pickle.root()) {
        Node::List(span) => match pickle.children(*span) {
            [item] => Ok(*item),
            items => Err(no_list_of_one(&format!("list of {}", items.len()))),
        },
        _ => Err(no_list_of_one("another object")),
    }
}

/// Replaces every object below `key` whose class or name (module, name) is not `known` with a plain
/// value. Returns the value and the replaced objects; `None` if there are none.
///
/// A member of an enumeration becomes its value. An object without a plain form loses its entry in
/// a dict, or becomes `None` elsewhere. All other objects stay unchanged, including shared and
/// cyclic ones.
///
/// # Errors
///
/// When the archive of an opaque object is damaged.
pub fn replace_classes(
    value: &Value,
    key: &str,
    known: &dyn Fn(&str, &str) -> bool,
) -> Result<Option<(Value, Vec<ReplacedObject>)>, FormatError> {
    match value {
        Value::Opaque(opaque) => in_archive(&opaque.encoded, Some(key), known),
        Value::Dict(dict) => {
            let Some(Value::Opaque(opaque)) = dict.get(key) else { return Ok(None) };
            let Some((item, mut replaced)) = in_archive(&opaque.encoded, None, known)? else {
                return Ok(None);
            };
            for object in &mut replaced {
                object.path = format!("{key}.{}", object.path);
            }
            let mut dict = dict.clone();
            dict.insert(key, item);
            Ok(Some((Value::Dict(dict), replaced)))
        }
        _ => Ok(None),
    }
}

/// Applies [`replace_classes`] to the object of an archive: below `key` of its root dict, or
/// everywhere.
fn in_archive(
    archive_bytes: &Bytes,
    key: Option<&str>,
    known: &dyn Fn(&str, &str) -> bool,
) -> Result<Option<(Value, Vec<ReplacedObject>)>, FormatError> {
    let mut replaced = Vec::new();
    let root = ArchiveIndex::read(&Sparse::whole(archive_bytes))?;
    let root = root.root().to_owned();
    let encoded = archive(&root, |writer, storages| {
        storages.splice(writer, archive_bytes, |pickle| {
            let from = match key {
                Some(key) => entry(pickle, key),
                None => Some(pickle.root()),
            };
            if let Some(from) = from {
                replaced = pickle.replace_classes(from, known);
            }
            Ok(pickle.root())
        })
    })?;
    for object in &mut replaced {
        if let Some(key) = key {
            object.path = format!("{key}.{}", object.path);
        }
    }
    if replaced.is_empty() {
        return Ok(None);
    }
    Ok(Some((decode_object(&encoded)?, replaced)))
}

/// The value of a key in the root dict of a pickle.
fn entry(pickle: &Pickle<'_>, key: &str) -> Option<NodeId> {
    let Node::Dict(span) = pickle.node(pickle.root()) else { return None };
    let mut entries = pickle.entries(*span);
    entries.find_map(|(name, value)| (pickle.str(name) == Some(key)).then_some(value))
}

fn no_list_of_one(found: &str) -> FormatError {
    FormatError::new("object", format!("a list of one was expected, there is a {found}"))
}

fn archive(
    root: &str,
    write: impl FnOnce(&mut Writer, &mut Storages) -> Result<(), FormatError>,
) -> Result<Bytes, FormatError> {
    let mut writer = Writer::new();
    let mut storages = Storages::default();
    write(&mut writer, &mut storages)?;
    let bytes: Vec<&[u8]> = storages
        .all
        .iter()
        .map(|storage| match &storage.content {
            StorageContent::Bytes(bytes) => &**bytes,
            StorageContent::Item(_) | StorageContent::Kept { .. } => &[],
        })
        .collect();
    ArchiveEncoder::encode_with_root(root, RecordSet::default(), writer.finish()?, &bytes)
}

#[cfg(test)]
mod tests {
    use dcp_core::value::Dict;
    use dcp_core::{DType, Tensor};

    use super::*;

    /// `[{"args": Namespace(n=1), "t": a tensor}]`, by protocol 2.
    fn list_of_an_object() -> Bytes {
        let mut writer = Writer::new();
        let mut storages = Storages::default();
        let tensor = Tensor::replicated(DType::UInt8, [3], vec![7, 8, 9]).unwrap();
        writer
            .list(std::iter::once(()), |writer, ()| {
                writer.dict(["args", "t"].into_iter(), |writer, key| {
                    writer.constant(key);
                    if key == "t" {
                        return writer.value(&Value::Tensor(tensor.clone()), &mut storages);
                    }
                    writer.global("argparse", "Namespace");
                    writer.empty_tuple();
                    writer.new_object();
                    writer.dict(std::iter::once("n"), |writer, key| {
                        writer.constant(key);
                        writer.int(1);
                        Ok::<_, FormatError>(())
                    })?;
                    writer.build();
                    Ok(())
                })
            })
            .unwrap();
        ArchiveEncoder::encode(RecordSet::default(), writer.finish().unwrap(), &[&[7, 8, 9]])
            .unwrap()
    }

    #[test]
    fn an_opaque_item_is_unwrapped_and_wrapped_again() {
        let blob = list_of_an_object();
        let item = decode_only_item(&blob).unwrap();
        assert!(matches!(item, Value::Opaque(_)));
        let dict = item.view().as_dict().unwrap();
        let tensor = dict.get("t").and_then(Value::as_tensor).unwrap();
        assert_eq!(tensor.to_vec(), Some(vec![7, 8, 9]));
        assert_eq!(dict.get("args").unwrap().kind(), "Namespace");
        let wrapped = encode_value(&Value::List(vec![item.clone()]), STREAM_ROOT).unwrap();
        let again = decode_only_item(&wrapped).unwrap();
        assert!(again.view().same(item.view()), "{again:?}");
    }

    #[test]
    fn a_plain_item_is_plain_and_an_archive_of_that_root_comes_back() {
        let dict = Value::Dict(Dict::from([("iteration", 10)]));
        let blob = encode_value(&Value::List(vec![dict.clone()]), STREAM_ROOT).unwrap();
        assert!(decode_only_item(&blob).unwrap().same(&dict));
        let opaque = decode_object(&list_of_an_object()).unwrap();
        assert_eq!(encode_value(&opaque, STREAM_ROOT).unwrap(), list_of_an_object());
        let common = encode_value(&opaque, "common").unwrap();
        assert_eq!(ArchiveIndex::read(&Sparse::whole(&common)).unwrap().root(), "common");
        assert!(decode_object(&common).unwrap().view().same(opaque.view()));
    }

    #[test]
    fn anything_else_is_refused() {
        for value in [Value::None, Value::List(vec![]), Value::List(vec![1.into(), 2.into()])] {
            let blob = encode_value(&value, STREAM_ROOT).unwrap();
            let error = decode_only_item(&blob).unwrap_err();
            assert!(error.to_string().contains("a list of one"), "{error}");
        }
        let blob = list_of_an_object();
        for len in [0, 1, blob.len() / 2, blob.len() - 1] {
            assert!(decode_only_item(&blob.slice(..len)).is_err());
        }
    }
}
