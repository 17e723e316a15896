//! Decodes the placements of chunks and objects.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::metadata::{Encoding, Entry, FileId, Placement};
use dcp_core::{CheckpointMetadata, FormatError, Key};

use super::attributes::{Graph, bad};
use super::class::Class;
use crate::pickle::{Node, NodeId};

/// Applies the placements of `storage_data` to chunks and objects.
#[derive(Debug)]
pub(super) struct Places<'g, 'p, 'a> {
    graph: &'g Graph<'p, 'a>,
    out: &'g mut CheckpointMetadata,
    files: HashMap<&'p str, FileId>,
    /// Encodings by the node of their transforms; `None` for items without.
    encodings: HashMap<Option<NodeId>, u16>,
    /// Positions of chunks by offsets, for tensors with wrong hints.
    by_offsets: HashMap<usize, HashMap<Box<[u64]>, usize>>,
    offsets: Vec<u64>,
}

impl<'g, 'p, 'a> Places<'g, 'p, 'a> {
    pub(super) fn new(graph: &'g Graph<'p, 'a>, out: &'g mut CheckpointMetadata) -> Self {
        Self {
            graph,
            out,
            files: HashMap::new(),
            encodings: HashMap::new(),
            by_offsets: HashMap::new(),
            offsets: Vec::new(),
        }
    }

    /// Reads one entry of `storage_data`.
    pub(super) fn place(&mut self, index: NodeId, info: NodeId) -> Result<(), FormatError> {
        let graph = self.graph;
        let index = graph.instance(index, Class::Index, "a key of storage_data")?;
        let fqn = graph.require(index, "fqn", "a key of storage_data")?;
        let fqn = graph.str(fqn, "a name in storage_data")?;
        let placement = self.placement(fqn, info)?;
        let Some(position) = self.out.index_of(fqn) else { return Ok(()) };

        // Objects have no offset; 0-dim tensors have an empty one.
        let offset = graph
            .attribute(index, "offset")
            .filter(|id| !matches!(graph.pickle.node(*id), Node::None));
        let Some(offset) = offset else {
            if let Some((_, Entry::Object(object))) = self.out.at_mut(position) {
                object.placement = Some(placement);
            }
            return Ok(());
        };
        self.offsets.clear();
        graph.dims(offset, "an offset in storage_data", &mut self.offsets)?;
        let hint = graph.attribute(index, "index").and_then(|id| graph.pickle.int(id));
        let hint = hint.and_then(|hint| usize::try_from(hint).ok());
        let chunk = self.chunk(position, hint);
        if let (Some(chunk), Some((_, Entry::Tensor(tensor)))) = (chunk, self.out.at_mut(position))
        {
            tensor.chunks.place(chunk, placement);
        }
        Ok(())
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
        let info = graph
            .instance(info, Class::StorageInfo, "a place in storage_data")
            .map_err(|error| bad(format!("{}: {}", what(), error.problem())))?;
        let path = graph.require(info, "relative_path", "a place")?;
        let path = graph.str(path, "a file name in storage_data")?;
        let number = |name: &str| {
            let id = graph.require(info, name, "a place")?;
            graph.uint(id, name).map_err(|error| bad(format!("{}: {}", what(), error.problem())))
        };
        let (byte_offset, byte_len) = (number("offset")?, number("length")?);
        let transforms = graph
            .attribute(info, "transform_descriptors")
            .filter(|id| !matches!(graph.pickle.node(*id), Node::None));
        let encoding = match self.encodings.get(&transforms) {
            Some(encoding) => *encoding,
            None => self.new_encoding(&what(), transforms)?,
        };
        let file = match self.files.get(path) {
            Some(file) => *file,
            None => self.new_file(&what(), path)?,
        };
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
