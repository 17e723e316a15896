//! Decodes the placements of chunks and objects.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::metadata::{Encoding, Entry, FileId, Placement};
use dcp_core::{CheckpointMetadata, FormatError, Key};

use super::attributes::{Graph, Wanted, bad, missing};
use super::class::Class;
use crate::pickle::{Field, Node, NodeId};

/// Applies the placements of `storage_data` to chunks and objects.
#[derive(Debug)]
pub(super) struct Places<'g, 'p, 'a> {
    graph: &'g Graph<'p, 'a>,
    out: &'g mut CheckpointMetadata,
    index: Wanted<3>,
    info: Wanted<4>,
    files: HashMap<&'p str, FileId>,
    /// The same by the node of the name.
    files_by_node: Vec<Option<FileId>>,
    /// Encodings by the node of their transforms; `None` for items without.
    encodings: HashMap<Option<NodeId>, u16>,
    last_encoding: Option<(Option<NodeId>, u16)>,
    /// Positions of chunks by offsets, for tensors with wrong hints.
    by_offsets: HashMap<usize, HashMap<Box<[u64]>, usize>>,
    offsets: Vec<u64>,
    /// The last name and its position: those of one tensor mostly come together.
    last: Option<(&'p str, usize)>,
}

impl<'g, 'p, 'a> Places<'g, 'p, 'a> {
    pub(super) fn new(graph: &'g Graph<'p, 'a>, out: &'g mut CheckpointMetadata) -> Self {
        Self {
            graph,
            out,
            index: Wanted::new(["fqn", "index", "offset"]),
            info: Wanted::new(["relative_path", "offset", "length", "transform_descriptors"]),
            files: HashMap::new(),
            files_by_node: Vec::new(),
            encodings: HashMap::new(),
            last_encoding: None,
            by_offsets: HashMap::new(),
            offsets: Vec::new(),
            last: None,
        }
    }

    /// Reads one entry of `storage_data`.
    pub(super) fn place(&mut self, index: NodeId, info: NodeId) -> Result<(), FormatError> {
        let graph = self.graph;
        let what = "a key of storage_data";
        let [fqn, hint, offset] =
            graph.parts(index, Class::Index, &self.index, || what.to_owned())?;
        let fqn = fqn.ok_or_else(|| missing(what, "fqn"))?;
        let fqn = graph.field_str(fqn, "a name in storage_data")?;
        let placement = self.placement(fqn, info)?;
        let Some(position) = self.position(fqn) else { return Ok(()) };

        // Objects have no offset; 0-dim tensors have an empty one.
        let Some(offset) = offset.filter(|offset| !graph.is_none(Some(*offset))) else {
            if let Some((_, Entry::Object(object))) = self.out.at_mut(position) {
                object.placement = Some(placement);
            }
            return Ok(());
        };
        self.offsets.clear();
        graph.field_dims(offset, "an offset in storage_data", &mut self.offsets)?;
        let hint = hint.and_then(|hint| graph.field_int(hint));
        let hint = hint.and_then(|hint| usize::try_from(hint).ok());
        let chunk = self.chunk(position, hint);
        if let (Some(chunk), Some((_, Entry::Tensor(tensor)))) = (chunk, self.out.at_mut(position))
        {
            tensor.chunks.place(chunk, placement);
        }
        Ok(())
    }

    fn position(&mut self, fqn: &'p str) -> Option<usize> {
        if let Some((name, position)) = self.last
            && name == fqn
        {
            return Some(position);
        }
        let position = self.out.index_of(fqn)?;
        self.last = Some((fqn, position));
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
        // PyTorch (2.15) follows absolute and `..` paths.
        let key = Key::new(path)
            .map_err(|error| bad(format!("{what} is not allowed: {error}")).with_source(error))?;
        let file = self
            .out
            .intern_file(&key)
            .ok_or_else(|| bad("it has more files than can be numbered"))?;
        self.files.insert(path, file);
        Ok(file)
    }
}
