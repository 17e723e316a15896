//! Checkpoints in memory.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::storage::{PutMode, StorageExt};
use dcp_core::{DType, Payload, Storage};
use dcp_formats::dcp::DcpWriter;
use dcp_formats::safetensors::{Header, SafetensorsItem, TensorInfo, encode_header, header_len};
use dcp_jobs::convert::to_safetensors;
use dcp_jobs::reshard::reshard;
use dcp_jobs::write::Target;
use dcp_jobs::{JobOptions, Source};
use dcp_mapping::{Facts, MapOptions, Mapped, Mapping, MappingError, map_to_hf, map_to_megatron};
pub(crate) use dcp_testing::{block_on, key};
use indexmap::IndexMap;

/// A tensor of 32-bit elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    pub(crate) shape: Vec<usize>,
    pub(crate) elements: Vec<u32>,
}

pub(crate) type Tensors = BTreeMap<String, Tensor>;

impl Tensor {
    pub(crate) fn new(shape: &[usize], of: impl FnMut(&[usize]) -> u32) -> Self {
        let elements = indices(shape).iter().map(Vec::as_slice).map(of).collect();
        Self { shape: shape.to_vec(), elements }
    }

    pub(crate) fn at(&self, index: &[usize]) -> u32 {
        assert_eq!(index.len(), self.shape.len());
        let flat = index.iter().zip(&self.shape).fold(0, |flat, (i, n)| {
            assert!(i < n, "{index:?} in {:?}", self.shape);
            flat * n + i
        });
        self.elements[flat]
    }
}

fn indices(shape: &[usize]) -> Vec<Vec<usize>> {
    shape.iter().fold(vec![vec![]], |all, &n| {
        all.iter().flat_map(|at| (0..n).map(|i| [at.as_slice(), &[i]].concat())).collect()
    })
}

pub(crate) fn job() -> JobOptions {
    JobOptions::default().with_max_memory(1 << 20)
}

/// A safetensors file.
pub(crate) fn safetensors(tensors: &Tensors) -> Source {
    let dims = |t: &Tensor| t.shape.iter().map(|n| *n as u64).collect();
    let items: Vec<_> = tensors
        .iter()
        .map(|(name, tensor)| SafetensorsItem {
            name: name.as_str().into(),
            dtype: DType::Float32,
            shape: dims(tensor),
        })
        .collect();
    let encoded = encode_header(&items, &IndexMap::new()).unwrap();
    let mut bytes = encoded.bytes.to_vec();
    for index in encoded.order {
        let elements = &tensors[&*items[index].name].elements;
        bytes.extend(elements.iter().flat_map(|e| e.to_le_bytes()));
    }
    block_on(async {
        let file: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        file.put(&key("in.safetensors"), bytes.into(), PutMode::Create).await.unwrap();
        Source::safetensors(file, key("in.safetensors"))
    })
}

/// A checkpoint in PyTorch's format, as `ranks` ranks save it: tensors in several chunks.
pub(crate) fn checkpoint(source: &Source, ranks: u32) -> Source {
    block_on(async {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let writer = DcpWriter::builder(Arc::clone(&storage)).build();
        reshard(source, &writer, ranks, &job()).await.unwrap();
        Source::dcp(storage, false)
    })
}

/// All tensors of a source, read in segments.
pub(crate) fn contents(source: &Source) -> Tensors {
    block_on(async {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let target = Target::new(Arc::clone(&storage), key("out.safetensors"));
        to_safetensors(source, &target, &job()).await.unwrap();
        parse(&storage.read_all(&key("out.safetensors")).await.unwrap())
    })
}

/// The tensors of a safetensors file of 32-bit elements.
pub(crate) fn parse(bytes: &[u8]) -> Tensors {
    let len = usize::try_from(header_len(bytes, bytes.len() as u64).unwrap()).unwrap();
    let (json, data) = bytes[8..].split_at(len);
    let header = Header::parse(json, data.len() as u64).unwrap();
    let tensor = |info: &TensorInfo| {
        assert_eq!(info.dtype, DType::Float32);
        let bytes = &data[info.byte_range.start as usize..info.byte_range.end as usize];
        let elements = bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap()));
        let shape = info.shape.iter().map(|n| *n as usize).collect();
        Tensor { shape, elements: elements.collect() }
    };
    header.tensors().map(|(name, info)| (name.to_string(), tensor(info))).collect()
}

fn fixtures(name: &str) -> PathBuf {
    dcp_testing::fixture("megatron").join(name)
}

/// A checkpoint that Megatron wrote.
pub(crate) fn stored(name: &str) -> Source {
    let ckpt = ["ckpt", "iter_0000010"].map(|folder| fixtures(name).join(folder));
    let ckpt = ckpt.into_iter().find(|folder| folder.is_dir()).unwrap();
    let storage = MemoryStorage::new();
    for file in std::fs::read_dir(ckpt).unwrap() {
        let file = file.unwrap();
        let payload = Payload::from(std::fs::read(file.path()).unwrap());
        let name = file.file_name().into_string().unwrap();
        block_on(storage.put(&key(&name), payload, PutMode::Create)).unwrap();
    }
    Source::dcp(Arc::new(storage), false)
}

/// The same, and the tensors that are in it.
pub(crate) fn fixture(name: &str) -> (Source, Tensors) {
    let expected = std::fs::read(fixtures(name).join("expected.safetensors")).unwrap();
    (stored(name), parse(&expected))
}

/// The arguments in it.
pub(crate) fn arguments(name: &str) -> Facts {
    let expected = std::fs::read(fixtures(name).join("expected.json")).unwrap();
    let expected: serde_json::Value = serde_json::from_slice(&expected).unwrap();
    let args = &expected["common"]["args"]["__namespace__"];
    Facts::from_args(args.as_object().unwrap().clone())
}

pub(crate) fn to_hf_of(
    source: &Source,
    mapping: &Mapping,
    facts: &Facts,
    options: &MapOptions,
) -> Result<Mapped, MappingError> {
    block_on(map_to_hf(source, mapping, facts, options, &job()))
}

pub(crate) fn to_megatron_of(
    source: &Source,
    mapping: &Mapping,
    facts: &Facts,
    options: &MapOptions,
) -> Result<Mapped, MappingError> {
    block_on(map_to_megatron(source, mapping, facts, options, &job()))
}
