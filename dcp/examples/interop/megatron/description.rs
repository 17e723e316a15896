//! The description of the state that both halves build, from the Python half.

use std::path::Path;

use dcp::core::value::{Dict, Global, Object};
use dcp::megatron::sharded::ObjectKey;
use dcp::{DType, Value};
use serde_json::Value as Json;

use crate::{Result, expected, formula};

/// The description of the state, from the Python half.
pub(super) struct Description(Json);

impl Description {
    pub(super) fn read(path: &str) -> Result<Self> {
        Ok(Self(serde_json::from_slice(&std::fs::read(Path::new(path))?)?))
    }

    /// The common state that Rust makes itself, the arguments in an `argparse.Namespace`.
    pub(super) fn made(&self) -> Result<Dict> {
        let mut common = dict(self.0.get("made").unwrap_or(&Json::Null))?;
        let mut args = Object::new(Global::new("argparse", "Namespace"), Vec::new());
        args.state = Some(dict(self.0.get("args").unwrap_or(&Json::Null))?.into());
        common.insert("args", Value::Object(Box::new(args)));
        Ok(common)
    }

    /// The content metadata to save.
    pub(super) fn content_to_save(&self) -> Result<Dict> {
        dict(self.content())
    }

    /// The common state as tagged JSON: what Rust makes itself, or the whole that Megatron saves.
    pub(super) fn common(&self, whole: bool) -> &Json {
        self.0.get(if whole { "common_whole" } else { "common" }).unwrap_or(&Json::Null)
    }

    /// The specifications under a name.
    pub(super) fn list(&self, name: &str) -> impl Iterator<Item = &Json> {
        self.0.get(name).and_then(Json::as_array).into_iter().flatten()
    }

    /// What an object is, as tagged JSON.
    pub(super) fn object(&self, at: &ObjectKey) -> Result<Json> {
        let mut objects = self.list("objects");
        let spec = objects.find(|spec| spec.get("key").and_then(Json::as_str) == Some(at.key()));
        let spec = spec.ok_or_else(|| format!("{at} is not expected"))?;
        let Some(values) = spec.get("values").and_then(Json::as_array) else {
            return Ok(by_formula(at));
        };
        let number = usize::try_from(at.offset().first().copied().unwrap_or(0))?;
        Ok(values.get(number).unwrap_or(&Json::Null).clone())
    }

    /// How many layers the model has.
    pub(super) fn layers(&self) -> Result<u64> {
        number(&self.0, "layers")
    }

    /// The content metadata as tagged JSON.
    pub(super) fn content(&self) -> &Json {
        self.0.get("content").unwrap_or(&Json::Null)
    }
}

/// A tensor of the description.
pub(super) struct Spec {
    pub(super) key: String,
    pub(super) path: Vec<String>,
    pub(super) shape: Vec<u64>,
    pub(super) dtype: DType,
    pub(super) prepended: usize,
    pub(super) cut: Option<usize>,
    pub(super) stage: String,
    pub(super) gated: bool,
    pub(super) pieces: u64,
    pub(super) whole: Vec<u8>,
}

impl Spec {
    pub(super) fn new(json: &Json) -> Result<Self> {
        let key = expected::text(json, "key")?.to_owned();
        let dtype: DType = expected::text(json, "dtype")?.parse()?;
        let shape = expected::numbers(Some(json), "shape")?;
        let form = expected::text(json, "form")?;
        let stage = if form == "uneven" { form } else { expected::text(json, "stage")? };
        let path = json.get("path").and_then(Json::as_array).into_iter().flatten();
        Ok(Self {
            whole: formula(&key, dtype, &shape, 0),
            path: path.map(|item| item.as_str().unwrap_or_default().to_owned()).collect(),
            prepended: usize::try_from(number(json, "prepend")?)?,
            cut: json.get("tp").and_then(Json::as_u64).map(usize::try_from).transpose()?,
            pieces: number(json, "pieces")?,
            stage: stage.to_owned(),
            gated: form == "swiglu",
            key,
            dtype,
            shape,
        })
    }
}

/// An object of which there is one for each rank, as tagged JSON.
fn by_formula(at: &ObjectKey) -> Json {
    let hex: String = at.offset().iter().map(|n| format!("{n:02x}")).collect();
    let offset: &[u64] = at.offset();
    serde_json::json!({"t": "dict", "v": [
        ["key", **at.key()],
        ["offset", {"t": "list", "v": offset}],
        ["blob", {"t": "bytes", "hex": hex}],
    ]})
}

fn dict(json: &Json) -> Result<Dict> {
    match expected::value_of(json)? {
        Value::Dict(dict) => Ok(dict),
        other => Err(format!("a dict is a {}", other.kind()).into()),
    }
}

/// A field that is a number.
pub(super) fn number(json: &Json, field: &str) -> Result<u64> {
    json.get(field).and_then(Json::as_u64).ok_or_else(|| format!("no {field}").into())
}
