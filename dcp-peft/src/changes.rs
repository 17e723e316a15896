//! The changes of an adapter to the tensors of a base model.
//!
//! Keys of an adapter are those of the model with `base_model.model.` in front. Five suffixes belong to a
//! module that is adapted; what has none of them is a whole tensor that replaces one of the model
//! (`modules_to_save`, biases, and the embedding below an adapted one).

use std::collections::{BTreeMap, HashMap};

use dcp_core::metadata::TensorEntry;
use dcp_core::text::{Quoted, counted};
use dcp_core::{CheckpointMetadata, DType};
use dcp_jobs::{Error, ErrorKind};

use crate::adapter_config::AdapterConfig;
use crate::orientation::Orientations;

const ROOT: &str = "base_model.model.";

/// The values that are written for a tensor of the base.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Change {
    /// The tensor of the adapter whose values replace those of the base.
    pub(crate) replaced: Option<usize>,
    /// Whether a module of the adapter takes the place of that of the base, which PEFT's model then still has
    /// wherever else it is used. Otherwise the parameter itself changes.
    pub(crate) unties: bool,
    /// The product that is added.
    pub(crate) product: Option<Product>,
}

/// Two matrices whose scaled product is added to a matrix of the base.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Product {
    /// Rank × inputs.
    pub(crate) a: usize,
    /// Outputs × rank.
    pub(crate) b: usize,
    /// The length of each output's weights after the merge, of a DoRA.
    pub(crate) magnitudes: Option<usize>,
    pub(crate) rank: u64,
    pub(crate) inputs: u64,
    pub(crate) scaling: f32,
    /// Whether the matrix is stored as inputs × outputs.
    pub(crate) is_input_first: bool,
    /// Whether the product is rounded to the dtype of the base before it is added, as PEFT's merge of an
    /// embedding does; otherwise the sum is rounded once.
    pub(crate) is_rounded_alone: bool,
}

/// The tensors of one adapted module, by their position in the index of the adapter.
#[derive(Debug, Default)]
struct Module {
    a: Option<usize>,
    b: Option<usize>,
    embedding_a: Option<usize>,
    embedding_b: Option<usize>,
    magnitudes: Option<usize>,
}

impl Module {
    fn slot(&mut self, suffix: &str) -> Option<&mut Option<usize>> {
        Some(match suffix {
            "lora_A.weight" => &mut self.a,
            "lora_B.weight" => &mut self.b,
            "lora_embedding_A" => &mut self.embedding_a,
            "lora_embedding_B" => &mut self.embedding_b,
            // PEFT before 0.10 has a parameter, and since then a module with a weight.
            "lora_magnitude_vector" | "lora_magnitude_vector.weight" => &mut self.magnitudes,
            _ => return None,
        })
    }
}

/// A tensor of the adapter that takes the place of one of the base, by its position.
#[derive(Clone, Copy, Debug)]
struct Replacement {
    position: usize,
    unties: bool,
}

/// The changes of an adapter, by the name of the tensor in the model.
#[derive(Debug, Default)]
struct Wanted {
    modules: BTreeMap<String, Module>,
    replaced: BTreeMap<String, Replacement>,
}

impl Wanted {
    fn of(adapter: &CheckpointMetadata) -> Result<Self, Error> {
        let mut wanted = Self::default();
        for (position, (fqn, entry)) in adapter.iter().enumerate() {
            let foreign = || {
                let message = format!("{} is no key of an adapter of PEFT", Quoted(fqn));
                Error::new(ErrorKind::Unsupported, message)
                    .with_hint(format!("keys of adapters begin with {ROOT:?}"))
            };
            let name = fqn.strip_prefix(ROOT).ok_or_else(foreign)?;
            entry.as_tensor().ok_or_else(foreign)?;
            let Some(at) = name.find(".lora_") else {
                // The parameter below an adapted module is loaded into that of the base.
                let unties = !name.contains(".base_layer.");
                let name = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".");
                let replacement = Replacement { position, unties };
                if wanted.replaced.insert(name.clone(), replacement).is_some() {
                    let message = format!("the adapter has two tensors for {}", Quoted(&name));
                    return Err(Error::new(ErrorKind::Unsupported, message)
                        .with_hint("merge the adapter with PEFT's merge_and_unload"));
                }
                continue;
            };
            let (module, suffix) = (&name[..at], &name[at + 1..]);
            let module = wanted.modules.entry(module.to_owned()).or_default();
            let slot = module.slot(suffix).ok_or_else(|| {
                let message = format!("{} is a tensor whose effect is not known", Quoted(fqn));
                Error::new(ErrorKind::Unsupported, message)
                    .with_hint("merge the adapter with PEFT's merge_and_unload")
            })?;
            *slot = Some(position);
        }
        if wanted.modules.is_empty() && wanted.replaced.is_empty() {
            return Err(Error::new(ErrorKind::Unsupported, "the adapter has no tensors"));
        }
        Ok(wanted)
    }

    /// The names of the changed tensors.
    fn names(&self) -> impl Iterator<Item = String> {
        let weights = self.modules.keys().map(|module| format!("{module}.weight"));
        weights.chain(self.replaced.keys().cloned())
    }
}

/// The place of a model in a base, whose names may have a part in front of them, or lack one:
/// transformers saves the weights of a `GPT2LMHeadModel` with or without `transformer.`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Root {
    /// The number of leading parts that the base lacks: 0 or 1.
    dropped: usize,
    prefix: String,
}

impl Root {
    fn name(&self, name: &str) -> String {
        let name = match self.dropped {
            0 => name,
            // A head has no part in front of it: `weight` alone is the end of every name.
            _ => name
                .split_once('.')
                .filter(|(_, rest)| rest.contains('.'))
                .map_or(name, |(_, rest)| rest),
        };
        format!("{}{name}", self.prefix)
    }

    /// Finds where all of `wanted` are.
    fn find(base: &CheckpointMetadata, wanted: &Wanted) -> Result<Self, Error> {
        let has = |root: &Self, name: &String| {
            base.get(&root.name(name)).is_some_and(|entry| entry.as_tensor().is_some())
        };
        let has_all = |root: &Self| wanted.names().all(|name| has(root, &name));
        let first = wanted.names().next().unwrap_or_default();
        let mut found = Vec::new();
        for dropped in [0, 1] {
            let plain = Self { dropped, prefix: String::new() };
            if has_all(&plain) {
                return Ok(plain);
            }
            let end = format!(".{}", plain.name(&first));
            let prefixes = base.iter().filter_map(|(fqn, _)| fqn.strip_suffix(end.as_str()));
            let prefixed = prefixes.map(|prefix| Self { dropped, prefix: format!("{prefix}.") });
            found.extend(prefixed.filter(has_all));
            if !found.is_empty() {
                break;
            }
        }
        match found.as_slice() {
            [one] => Ok(one.clone()),
            [] => Err(Self::none(wanted, |name| has(&Self::default(), name))),
            [first, second, ..] => {
                let message = format!(
                    "the base has the model of the adapter below {} and below {}",
                    Quoted(first.prefix.trim_end_matches('.')),
                    Quoted(second.prefix.trim_end_matches('.'))
                );
                Err(Error::new(ErrorKind::Undecided, message).with_hint(
                    "write the one that is meant with `Keys::include` first, and merge into that",
                ))
            }
        }
    }

    fn none(wanted: &Wanted, has: impl Fn(&String) -> bool) -> Error {
        let all = wanted.names().count();
        let missing: Vec<_> = wanted.names().filter(|name| !has(name)).collect();
        let first = missing.first().map_or("", String::as_str);
        let message = format!(
            "the base lacks {} of the {} that the adapter changes, such as {}",
            counted(missing.len() as u64, "tensor"),
            all,
            Quoted(first)
        );
        Error::new(ErrorKind::Unmapped, message).with_hint(
            "the adapter is of another model, or the base has the names of another program: \
             `Checkpoint::convert` to hf gives it those of transformers; a head that is tied to the embedding is \
             not in the base by itself: save the base with tie_word_embeddings false, or merge with PEFT's \
             merge_and_unload",
        )
    }
}

/// The change of each tensor of `base`, by its position in the index.
///
/// # Errors
///
/// [`Unmapped`](ErrorKind::Unmapped) for tensors that the base does not have,
/// [`Disagreement`](ErrorKind::Disagreement) for other shapes, [`Unsupported`](ErrorKind::Unsupported) for
/// tensors that are no matrices of floats, and keys whose effect is not known.
pub(crate) fn changes(
    base: &CheckpointMetadata,
    adapter: &CheckpointMetadata,
    config: &AdapterConfig,
) -> Result<HashMap<usize, Change>, Error> {
    let wanted = Wanted::of(adapter)?;
    let root = Root::find(base, &wanted)?;
    let orientations = Orientations::of(base);
    let mut changes: HashMap<usize, Change> = HashMap::new();
    for (name, Replacement { position, unties }) in &wanted.replaced {
        let (at, fqn, tensor) = tensor_of(base, root.name(name))?;
        let other = tensor_at(adapter, *position)?;
        if other.shape != tensor.shape {
            return Err(mismatch(
                &fqn,
                tensor,
                format!("the adapter replaces it by {}", other.shape),
            ));
        }
        refuse_dtype(&fqn, tensor.dtype, OF_BASE)?;
        refuse_dtype(&adapter.entry_name(*position), other.dtype, OF_ADAPTER)?;
        let change = Change { replaced: Some(*position), unties: *unties, product: None };
        changes.insert(at, change);
    }
    for (name, module) in &wanted.modules {
        let (at, fqn, tensor) = tensor_of(base, root.name(&format!("{name}.weight")))?;
        refuse_dtype(&fqn, tensor.dtype, OF_BASE)?;
        let product = product(adapter, config, &orientations, (name, module), (&fqn, tensor))?;
        let none = Change { replaced: None, unties: false, product: None };
        changes.entry(at).or_insert(none).product = Some(product);
    }
    Ok(changes)
}

/// The product of a module, with its shapes compared.
fn product(
    adapter: &CheckpointMetadata,
    config: &AdapterConfig,
    orientations: &Orientations,
    (name, module): (&str, &Module),
    (fqn, weight): (&str, &TensorEntry),
) -> Result<Product, Error> {
    let incomplete = || {
        let message = format!("the adapter has only one of the two matrices of {}", Quoted(name));
        Error::new(ErrorKind::Damaged, message).with_hint("save the adapter again")
    };
    let is_embedding = module.embedding_a.is_some() || module.embedding_b.is_some();
    if is_embedding && (module.a.is_some() || module.b.is_some()) {
        let message =
            format!("the adapter has matrices of a layer and of an embedding for {}", Quoted(name));
        return Err(Error::new(ErrorKind::Damaged, message).with_hint("save the adapter again"));
    }
    let (a, b) = match is_embedding {
        false => module.a.zip(module.b).ok_or_else(incomplete)?,
        true => module.embedding_a.zip(module.embedding_b).ok_or_else(incomplete)?,
    };
    if config.has_magnitudes() != module.magnitudes.is_some()
        || is_embedding && config.has_magnitudes()
    {
        let message = match module.magnitudes {
            Some(_) if is_embedding => format!("{} is an embedding with magnitudes", Quoted(name)),
            Some(_) => format!("{} has magnitudes, and use_dora is not set", Quoted(name)),
            None => format!("{} has no magnitudes, and use_dora is set", Quoted(name)),
        };
        return Err(Error::new(ErrorKind::Unsupported, message)
            .with_hint("merge the adapter with PEFT's merge_and_unload"));
    }
    let is_input_first = match is_embedding {
        true => true,
        false => is_input_first(adapter, config, orientations, (a, b), (fqn, weight))?,
    };
    let [outputs, inputs] = match weight.shape.as_ref() {
        [rows, columns] if is_input_first => [*columns, *rows],
        [rows, columns] => [*rows, *columns],
        _ => {
            return Err(mismatch(
                fqn,
                weight,
                "only matrices have an adapter that is read".to_owned(),
            ));
        }
    };
    let rank = config.rank(name);
    let mut expected = vec![(a, vec![rank, inputs]), (b, vec![outputs, rank])];
    expected.extend(module.magnitudes.map(|magnitudes| (magnitudes, vec![outputs])));
    for (position, shape) in expected {
        let tensor = tensor_at(adapter, position)?;
        if *tensor.shape != *shape {
            let other = adapter.entry_name(position);
            let problem = format!("{} is {} and not {:?}", Quoted(&other), tensor.shape, shape);
            return Err(mismatch(fqn, weight, problem));
        }
        refuse_dtype(&adapter.entry_name(position), tensor.dtype, OF_ADAPTER)?;
    }
    let (scaling, magnitudes) = (config.scaling(name), module.magnitudes);
    let is_rounded_alone = is_embedding;
    Ok(Product { a, b, magnitudes, rank, inputs, scaling, is_input_first, is_rounded_alone })
}

/// Whether the matrix `weight` is stored as inputs × outputs, as the two matrices `a` and `b` or its layer show.
fn is_input_first(
    adapter: &CheckpointMetadata,
    config: &AdapterConfig,
    orientations: &Orientations,
    (a, b): (usize, usize),
    (fqn, weight): (&str, &TensorEntry),
) -> Result<bool, Error> {
    let flag = config.is_input_first();
    let (a, b) = (tensor_at(adapter, a)?, tensor_at(adapter, b)?);
    let ([rows, columns], [_, inputs], [outputs, _]) =
        (weight.shape.as_ref(), a.shape.as_ref(), b.shape.as_ref())
    else {
        // The comparison of shapes says which is no matrix.
        return Ok(flag);
    };
    let stored = [*rows, *columns];
    orientations.is_input_first(fqn, stored, [*outputs, *inputs], flag).ok_or_else(|| {
        let message = format!(
            "{} is {}, and fan_in_fan_out is set, but nothing in its layer shows that it is stored as inputs × \
             outputs",
            Quoted(fqn),
            weight.shape
        );
        Error::new(ErrorKind::Undecided, message).with_hint(
            "set fan_in_fan_out to false in adapter_config.json where the layers of the model are nn.Linear",
        )
    })
}

fn tensor_at(metadata: &CheckpointMetadata, position: usize) -> Result<&TensorEntry, Error> {
    let entry = metadata.at(position).and_then(|(_, entry)| entry.as_tensor());
    entry.ok_or_else(|| {
        let message = format!("{} is not a tensor", metadata.entry_name(position));
        Error::new(ErrorKind::Damaged, message)
    })
}

/// The tensor `fqn`, with its position.
fn tensor_of(
    metadata: &CheckpointMetadata,
    fqn: String,
) -> Result<(usize, String, &TensorEntry), Error> {
    let position = metadata.index_of(&fqn).ok_or_else(|| {
        Error::new(ErrorKind::Unmapped, format!("the base has no {}", Quoted(&fqn)))
    })?;
    Ok((position, fqn, tensor_at(metadata, position)?))
}

fn mismatch(fqn: &str, tensor: &TensorEntry, problem: String) -> Error {
    let message = format!("{} is {}, and {problem}", Quoted(fqn), tensor.shape);
    Error::new(ErrorKind::Disagreement, message).with_hint(
        "the adapter is of another model, or its configuration of another adapter; where the vocabulary grew \
         for the training, resize the embeddings of the base first",
    )
}

/// The way out for tensors of a base that are no plain floats.
const OF_BASE: &str = "`Checkpoint::convert` writes a base of plain numbers first, with `Destination::dtype` or, \
                       where it reads them, `Conversion::dequantize`";
/// The way out for tensors of an adapter that are no plain floats.
const OF_ADAPTER: &str = "save the adapter with float32, bfloat16 or float16 tensors";

/// Refuses what is no plain float: codes of quantized weights are no numbers to add to.
fn refuse_dtype(fqn: &str, dtype: DType, way_out: &'static str) -> Result<(), Error> {
    if matches!(dtype, DType::Float32 | DType::BFloat16 | DType::Float16) {
        return Ok(());
    }
    let message =
        format!("{} is {dtype}, and adapters change float32, bfloat16 and float16", Quoted(fqn));
    Err(Error::new(ErrorKind::Unsupported, message).with_hint(way_out))
}
