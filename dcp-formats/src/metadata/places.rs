//! Decodes the placements of chunks and objects.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use dcp_core::metadata::{Encoding, Entry, FileId, Placement};
use dcp_core::{CheckpointMetadata, FormatError, Key};

use super::attributes::{Graph, Wanted, bad, missing};
use super::class::Class;
use crate::pickle::{Field, Node, NodeId};

/// The name of a key of `storage_data` in messages, and of the name in one.
const KEY: &str = "a key of storage_data";
const NAME: &str = "a name in storage_data";

/// The entries that a selective read leaves out of the index.
#[derive(Debug)]
pub(super) struct LeftOut {
    /// Whether the chunks of each entry are read.
    pub(super) kept: Vec<bool>,
    /// All entries, without chunks, and the files.
    pub(super) names: CheckpointMetadata,
}

/// A key of `storage_data`.
struct IndexKey<'p> {
    fqn: &'p str,
    /// The position of the chunk, if the writer is right.
    hint: Option<usize>,
    /// `None` for an object; a 0-dim tensor has an empty one.
    offset: Option<Field<'p>>,
}

/// Applies the placements of `storage_data` to chunks and objects.
#[derive(Debug)]
pub(super) struct Places<'g, 'p, 'a> {
    pub(super) graph: &'g Graph<'p, 'a>,
    pub(super) out: &'g mut CheckpointMetadata,
    /// `None` where the chunks of all entries are read.
    left_out: Option<&'g mut LeftOut>,
    name: Wanted<1>,
    path: Wanted<1>,
    index: Wanted<3>,
    info: Wanted<4>,
    files: HashMap<&'p str, FileId>,
    /// The files by the node of the name.
    files_by_node: Vec<Option<FileId>>,
    /// The names of files of entries that are left out, and whether a node is one of them.
    other_files: HashSet<&'p str>,
    other_files_by_node: Vec<bool>,
    /// Encodings by the node of their transforms; `None` for items without.
    encodings: HashMap<Option<NodeId>, u16>,
    last_encoding: Option<(Option<NodeId>, u16)>,
    /// Positions of chunks by offsets, for tensors with wrong hints.
    by_offsets: HashMap<usize, HashMap<Box<[u64]>, usize>>,
    offsets: Vec<u64>,
    /// The position of the last name. Those of one tensor come together, or those of one rank in the
    /// order of the index.
    last: usize,
}

impl<'g, 'p, 'a> Places<'g, 'p, 'a> {
    /// `left_out` is `None` where the chunks of all entries are read.
    pub(super) fn new(
        graph: &'g Graph<'p, 'a>,
        out: &'g mut CheckpointMetadata,
        left_out: Option<&'g mut LeftOut>,
    ) -> Self {
        Self {
            graph,
            out,
            left_out,
            name: Wanted::new(["fqn"]),
            path: Wanted::new(["relative_path"]),
            index: Wanted::new(["fqn", "index", "offset"]),
            info: Wanted::new(["relative_path", "offset", "length", "transform_descriptors"]),
            files: HashMap::new(),
            files_by_node: Vec::new(),
            other_files: HashSet::new(),
            other_files_by_node: Vec::new(),
            encodings: HashMap::new(),
            last_encoding: None,
            by_offsets: HashMap::new(),
            offsets: Vec::new(),
            last: 0,
        }
    }

    /// Whether the key of an entry is that of a tensor or object to read.
    pub(super) fn is_kept(&mut self, index: NodeId) -> Result<bool, FormatError> {
        if self.left_out.is_none() {
            return Ok(true);
        }
        let graph = self.graph;
        let [fqn] = graph.parts(index, Class::Index, &self.name, || KEY.to_owned())?;
        let fqn = fqn.ok_or_else(|| missing(KEY, "fqn"))?;
        let position = graph.field_text(fqn).and_then(|text| self.position(text));
        let kept = self.left_out.as_ref().map_or(&[][..], |left_out| &left_out.kept);
        if position.and_then(|position| kept.get(position)) == Some(&true) {
            return Ok(true);
        }
        graph.field_str(fqn, NAME).map(|_| false)
    }

    /// Reads one entry of `storage_data`.
    pub(super) fn place(&mut self, index: NodeId, info: NodeId) -> Result<(), FormatError> {
        if !self.is_kept(index)? {
            return self.note_file(info);
        }
        let key = self.index_key(index)?;
        let placement = self.placement(key.fqn, info)?;
        let Some(position) = self.position(key.fqn) else { return Ok(()) };
        if key.offset.is_none() {
            if let Some((_, Entry::Object(object))) = self.out.at_mut(position) {
                object.placement = Some(placement);
            }
            return Ok(());
        }
        let chunk = self.chunk_of(position, &key)?;
        if let (Some(chunk), Some((_, Entry::Tensor(tensor)))) = (chunk, self.out.at_mut(position))
        {
            tensor.chunks.place(chunk, placement);
        }
        Ok(())
    }

    /// Reads a key of `storage_data`.
    fn index_key(&self, index: NodeId) -> Result<IndexKey<'p>, FormatError> {
        let graph = self.graph;
        let [fqn, hint, offset] =
            graph.parts(index, Class::Index, &self.index, || KEY.to_owned())?;
        let fqn = graph.field_str(fqn.ok_or_else(|| missing(KEY, "fqn"))?, NAME)?;
        let hint = hint.and_then(|hint| graph.field_int(hint));
        let hint = hint.and_then(|hint| usize::try_from(hint).ok());
        let offset = offset.filter(|offset| !graph.is_none(Some(*offset)));
        Ok(IndexKey { fqn, hint, offset })
    }

    /// The position of the chunk that `key` names, of the tensor at `position`.
    fn chunk_of(
        &mut self,
        position: usize,
        key: &IndexKey<'p>,
    ) -> Result<Option<usize>, FormatError> {
        let Some(offset) = key.offset else { return Ok(None) };
        self.offsets.clear();
        self.graph.field_dims(offset, "an offset in storage_data", &mut self.offsets)?;
        Ok(self.chunk(position, key.hint))
    }

    /// The tensor that a key names, and the position of its chunk.
    pub(super) fn named_chunk(
        &mut self,
        index: NodeId,
    ) -> Result<Option<(usize, usize)>, FormatError> {
        let key = self.index_key(index)?;
        let Some(position) = self.position(key.fqn) else { return Ok(None) };
        Ok(self.chunk_of(position, &key)?.map(|chunk| (position, chunk)))
    }

    /// Notes the file of an entry that is left out.
    fn note_file(&mut self, info: NodeId) -> Result<(), FormatError> {
        let graph = self.graph;
        let what = || "a place in storage_data".to_owned();
        let [path] = graph.parts(info, Class::StorageInfo, &self.path, what)?;
        let path = path.ok_or_else(|| missing("a place", "relative_path"))?;
        let node = match path {
            Field::Node(id) => Some(id.index()),
            _ => None,
        };
        if node.is_some_and(|node| self.other_files_by_node.get(node) == Some(&true)) {
            return Ok(());
        }
        let text = graph.field_str(path, "a file name in storage_data")?;
        if let Some(left_out) = &mut self.left_out
            && self.other_files.insert(text)
        {
            let key = file_key("a place in storage_data", text)?;
            left_out.names.intern_file(&key).ok_or_else(too_many_files)?;
        }
        if let Some(node) = node {
            if node >= self.other_files_by_node.len() {
                self.other_files_by_node.resize(node + 1, false);
            }
            if let Some(noted) = self.other_files_by_node.get_mut(node) {
                *noted = true;
            }
        }
        Ok(())
    }

    fn position(&mut self, fqn: &str) -> Option<usize> {
        let is_it = |at: &usize| self.out.at(*at).is_some_and(|(name, _)| **name == *fqn);
        let near = [self.last, self.last + 1].into_iter().find(is_it);
        let position = near.or_else(|| self.out.index_of(fqn))?;
        self.last = position;
        Some(position)
    }

    /// The chunk at the offsets: at the hinted position, or found by a search.
    fn chunk(&mut self, position: usize, hint: Option<usize>) -> Option<usize> {
        let (_, Entry::Tensor(tensor)) = self.out.at(position)? else { return None };
        let hinted = hint.and_then(|hint| Some((hint, tensor.chunks.get(hint)?)));
        if let Some((hint, chunk)) = hinted
            && chunk.offsets == self.offsets
        {
            return Some(hint);
        }
        let positions = self.by_offsets.entry(position).or_insert_with(|| {
            // Of chunks at the same offsets the first counts, as in PyTorch.
            let mut positions = HashMap::new();
            for (n, chunk) in tensor.chunks.iter().enumerate() {
                // Of chunks at the same offsets the first counts, as in PyTorch.
                positions.entry(chunk.offsets.into()).or_insert(n);
            }
            positions
        });
        positions.get(self.offsets.as_slice()).copied()
    }

    fn placement(&mut self, fqn: &str, info: NodeId) -> Result<Placement, FormatError> {
        let graph = self.graph;
        let what = || format!("the place of {fqn:?}");
        let in_place = |error: FormatError| bad(format!("{}: {}", what(), error.problem()));
        let [path, byte_offset, byte_len, transforms] = graph
            .parts(info, Class::StorageInfo, &self.info, || "a place in storage_data".to_owned())
            .map_err(in_place)?;
        let path = path.ok_or_else(|| missing("a place", "relative_path"))?;
        let number = |part: Option<Field<'a>>, name: &str| {
            let part = part.ok_or_else(|| missing("a place", name))?;
            graph.field_uint(part, name).map_err(in_place)
        };
        let known = match path {
            Field::Node(id) => self.files_by_node.get(id.index()).copied().flatten(),
            _ => None,
        };
        let text = match known {
            Some(_) => "",
            None => graph.field_str(path, "a file name in storage_data")?,
        };
        let (byte_offset, byte_len) = (number(byte_offset, "offset")?, number(byte_len, "length")?);
        let transforms = match transforms.filter(|field| !graph.is_none(Some(*field))) {
            None => None,
            Some(Field::Node(id)) => Some(id),
            Some(_) => return Err(bad(format!("{}: transform_descriptors are no list", what()))),
        };
        let encoding = match self.last_encoding {
            Some((last, encoding)) if last == transforms => encoding,
            _ => match self.encodings.get(&transforms) {
                Some(encoding) => *encoding,
                None => self.new_encoding(&what(), transforms)?,
            },
        };
        self.last_encoding = Some((transforms, encoding));
        let file = match known.or_else(|| self.files.get(text).copied()) {
            Some(file) => file,
            None => self.new_file(&what(), text)?,
        };
        if let (None, Field::Node(id)) = (known, path) {
            if id.index() >= self.files_by_node.len() {
                self.files_by_node.resize(id.index() + 1, None);
            }
            if let Some(slot) = self.files_by_node.get_mut(id.index()) {
                *slot = Some(file);
            }
        }
        Ok(Placement { file, encoding, byte_offset, byte_len })
    }

    fn new_encoding(&mut self, what: &str, transforms: Option<NodeId>) -> Result<u16, FormatError> {
        let encoding = match transforms {
            Some(transforms) => self.transformed(what, transforms)?,
            None => Encoding::default(),
        };
        let id = self
            .out
            .intern_encoding(&encoding)
            .ok_or_else(|| bad("it has more encodings than can be numbered"))?;
        self.encodings.insert(transforms, id);
        Ok(id)
    }

    fn transformed(&self, what: &str, transforms: NodeId) -> Result<Encoding, FormatError> {
        let (Node::List(names) | Node::Tuple(names)) = *self.graph.pickle.node(transforms) else {
            return Err(self
                .graph
                .unexpected(&format!("{what}: transform_descriptors"), transforms));
        };
        let names = self.graph.pickle.children(names);
        let transforms = names
            .iter()
            .map(|name| self.graph.str(*name, &format!("{what}: a transform")).map(Arc::from))
            .collect::<Result<Vec<Arc<str>>, _>>()?;
        Ok(Encoding::default().with_transforms(transforms))
    }

    fn new_file(&mut self, what: &str, path: &'p str) -> Result<FileId, FormatError> {
        let file = self.out.intern_file(&file_key(what, path)?).ok_or_else(too_many_files)?;
        self.files.insert(path, file);
        Ok(file)
    }
}

/// The key of a file. PyTorch (2.15) follows absolute and `..` paths.
fn file_key(what: &str, path: &str) -> Result<Key, FormatError> {
    Key::new(path)
        .map_err(|error| bad(format!("{what} is not allowed: {error}")).with_source(error))
}

fn too_many_files() -> FormatError {
    bad("it has more files than can be numbered")
}
