//! Encodes the index of a checkpoint, for ranks that cannot read it themselves.

use std::sync::Arc;

use bytes::Bytes;

use super::{MessageReader, MessageWriter, bad};
use crate::error::PlanError;
use crate::names::key::Key;
use crate::plans::metadata::{CheckpointMetadata, Entry, ObjectEntry, Placement, TensorEntry};
use crate::tensors::region::Region;

const METADATA: &[u8; 4] = b"dcm2";

impl CheckpointMetadata {
    /// Encodes the whole index as a message.
    #[must_use]
    pub fn to_wire(&self) -> Bytes {
        let mut out = MessageWriter::new(*METADATA);
        out.number(self.files().len() as u64);
        self.files().iter().for_each(|file| out.text(file.as_str()));
        out.number(self.encodings().len() as u64);
        self.encodings().iter().for_each(|encoding| out.encoding(encoding));
        let origin = self.provenance();
        for text in [&origin.format, &origin.version, &origin.checkpoint_id, &origin.save_id] {
            out.option(text.as_ref(), |out, text| out.text(text));
        }
        out.number(origin.annotations.len() as u64);
        for (name, text) in &*origin.annotations {
            out.text(name);
            out.text(text);
        }
        out.number(self.len() as u64);
        for (fqn, entry) in self.iter() {
            out.text(fqn);
            out.path(entry.path());
            match entry {
                Entry::Object(object) => {
                    out.number(0);
                    out.option(object.placement.as_ref(), MessageWriter::placement);
                }
                Entry::Tensor(tensor) => {
                    out.number(1);
                    out.tensor(tensor);
                }
            }
        }
        out.finish()
    }

    /// Decodes a message.
    ///
    /// # Errors
    ///
    /// When the bytes are not an index of this version, or have invalid references.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, PlanError> {
        let mut input = MessageReader::new(bytes, *METADATA)?;
        let mut metadata = Self::new();
        let files = input.count()?;
        for _ in 0..files {
            let key = Key::new(input.text()?).map_err(|error| bad(error.to_string()))?;
            metadata.intern_file(&key).ok_or_else(|| bad("too many files"))?;
        }
        let encodings = input.count()?;
        for _ in 0..encodings {
            let encoding = input.encoding()?;
            metadata.intern_encoding(&encoding).ok_or_else(|| bad("too many encodings"))?;
        }
        if (metadata.files().len(), metadata.encodings().len()) != (files, encodings) {
            return Err(bad("a file or encoding twice"));
        }
        for field in 0..4 {
            let text = input.option(|input| input.text().map(Arc::<str>::from))?;
            let origin = metadata.provenance_mut();
            *[
                &mut origin.format,
                &mut origin.version,
                &mut origin.checkpoint_id,
                &mut origin.save_id,
            ][field] = text;
        }
        let annotations = input.count()?;
        let annotations =
            (0..annotations).map(|_| Ok((input.text()?.into(), input.text()?.into())));
        metadata.provenance_mut().annotations = annotations.collect::<Result<_, PlanError>>()?;
        let entries = input.count()?;
        for _ in 0..entries {
            let fqn = input.text()?;
            let path = input.path()?;
            let entry = match input.number()? {
                0 => {
                    let placement = input.option(|input| input.placement(files, encodings))?;
                    let mut object = ObjectEntry::new(placement);
                    object.path = path;
                    Entry::Object(object)
                }
                1 => {
                    let mut tensor = input.tensor(files, encodings)?;
                    tensor.path = path;
                    Entry::Tensor(tensor)
                }
                other => return Err(bad(format!("unknown kind of entry {other}"))),
            };
            metadata.insert(fqn, entry);
        }
        if metadata.len() != entries {
            return Err(bad("a name twice"));
        }
        input.finish()?;
        Ok(metadata)
    }
}

impl MessageWriter {
    fn tensor(&mut self, tensor: &TensorEntry) {
        self.dtype(tensor.dtype);
        self.dims(&tensor.shape);
        let properties = &tensor.properties;
        let flags = u64::from(properties.requires_grad) | u64::from(properties.pin_memory) << 1;
        self.number(flags);
        self.number(properties.memory_format.into());
        self.option(properties.strides.as_ref(), |out, strides| {
            out.number(strides.len() as u64);
            // Zigzag: small numbers of either sign are short.
            strides.iter().for_each(|n| out.number(((n << 1) ^ (n >> 63)) as u64));
        });
        self.number(tensor.chunks.len() as u64);
        for chunk in tensor.chunks.iter() {
            chunk.offsets.iter().chain(chunk.sizes).for_each(|n| self.number(*n));
            self.option(chunk.placement.as_ref(), Self::placement);
        }
    }
}

impl MessageReader<'_> {
    fn tensor(&mut self, files: usize, encodings: usize) -> Result<TensorEntry, PlanError> {
        let dtype = self.dtype()?;
        let mut tensor = TensorEntry::new(dtype, self.dims()?);
        let flags = self.number()?;
        tensor.properties.requires_grad = flags & 1 != 0;
        tensor.properties.pin_memory = flags & 2 != 0;
        tensor.properties.memory_format =
            u8::try_from(self.number()?).map_err(|_| bad("unknown memory format"))?;
        tensor.properties.strides = self.option(|input| {
            let strides = (0..input.count()?).map(|_| input.number());
            strides.map(|n| n.map(|n| (n >> 1) as i64 ^ -((n & 1) as i64))).collect()
        })?;
        let ndim = tensor.shape.ndim();
        for _ in 0..self.count()? {
            let (offsets, sizes) = (self.numbers(ndim)?, self.numbers(ndim)?);
            let placement: Option<Placement> =
                self.option(|input| input.placement(files, encodings))?;
            let region = Region::new(offsets, sizes).map_err(|error| bad(error.to_string()))?;
            let pushed = tensor.chunks.push(region.offsets(), region.sizes(), placement);
            pushed.map_err(|error| bad(error.to_string()))?;
        }
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plans::metadata::{Encoding, Layout};
    use crate::state::path::PathItem;
    use crate::tensors::dtype::DType;

    fn sample() -> CheckpointMetadata {
        let mut metadata = CheckpointMetadata::new();
        let file = metadata.intern_file(&Key::new("a/b.distcp").unwrap()).unwrap();
        let coded = Encoding::new(Layout::Raw).with_transforms(["stream.zstd/1".into()]);
        let encoding = metadata.intern_encoding(&coded).unwrap();
        for layout in [Layout::TorchArchive, Layout::Computed, Layout::TorchSave] {
            metadata.intern_encoding(&Encoding::new(layout)).unwrap();
        }
        let placement = Placement { file, encoding, byte_offset: 1 << 40, byte_len: 9 };
        metadata.provenance_mut().format = Some("torch_dcp".into());
        metadata.provenance_mut().save_id = Some("".into());
        metadata.provenance_mut().annotations = [("title".into(), "x".into())].into();
        let mut tensor = TensorEntry::new(DType::BFloat16, [5, 3]);
        tensor.path = Some([PathItem::Key("a".into()), PathItem::Index(3)].into());
        tensor.properties.requires_grad = true;
        tensor.properties.strides = Some(vec![3, -1]);
        tensor.chunks.push(&[0, 0], &[2, 3], Some(placement)).unwrap();
        tensor.chunks.push(&[2, 0], &[3, 3], None).unwrap();
        metadata.insert("a.3", Entry::Tensor(tensor));
        metadata.insert("", Entry::Object(ObjectEntry::new(Some(placement))));
        metadata.insert("lost", Entry::Object(ObjectEntry::new(None)));
        metadata.insert("scalar", Entry::Tensor(TensorEntry::new(DType::Int8, [])));
        metadata
    }

    #[test]
    fn an_index_arrives_as_it_was_sent() {
        let sent = sample();
        let wire = sent.to_wire();
        let found = CheckpointMetadata::from_wire(&wire).unwrap();
        assert_eq!(format!("{found:?}"), format!("{sent:?}"));
        assert_eq!(found.to_wire(), wire);
    }

    #[test]
    fn a_damaged_index_is_refused_without_a_panic() {
        let wire = sample().to_wire();
        for len in 0..wire.len() {
            assert!(CheckpointMetadata::from_wire(&wire[..len]).is_err(), "{len}");
        }
        for at in 0..8 * wire.len() {
            let mut damaged = wire.to_vec();
            damaged[at / 8] ^= 1 << (at % 8);
            let _ = CheckpointMetadata::from_wire(&damaged);
        }
    }
}
