//! Renders a summary of a Megatron-Core checkpoint, and its arguments as a table.

use std::fmt::Write as _;

use dcp::core::text::{Message, escaped};
use dcp::jobs::inspect::{KeySummary, Summary};
use dcp::megatron::jobs::{Description, Layers, ObjectGroup, ParallelSizes, object_key};
use indexmap::IndexMap;
use serde_json::{Map, Value, json};

use crate::output::Output;
use crate::output::render::value::python;
use crate::output::render::wrap::lines;
use crate::output::style::{columns, count, left, printable, shorten, size, thousands};

/// Objects of one key that are shown as one from this many on.
const GROUP_FROM: usize = 2;
/// Bytes of a value that are shown in a table that is not on a terminal.
const VALUE_MAX: usize = 200;
/// Columns that the names of facts take.
const NAME: usize = 10;
/// Stacks of layers that are shown.
const STACKS_MAX: usize = 8;

/// The lines that come before the tree.
pub(crate) fn facts(description: &Description, out: &Output) -> String {
    let mut text = String::new();
    let mut fact = |name: &str, value: String| {
        if value.is_empty() {
            return;
        }
        let width = out.width.map_or(usize::MAX, |width| width.saturating_sub(NAME + 1));
        for (at, line) in lines(&Message(&value).to_string(), width).iter().enumerate() {
            let name = left(if at == 0 { name } else { "" }, NAME);
            let _ = writeln!(text, "{} {line}", out.style.dim(&name));
        }
    };
    fact("format", format!("{}, common state in {}", description.format, description.common_place));
    let (by, read) = (&description.written_by, description.read_by);
    fact("written by", format!("Megatron-Core {by}; read by {read}"));
    fact("iteration", iteration(description));
    fact("parallel", parallel(&description.parallel));
    if let Some(said) = &description.parallel_of_args {
        fact("", format!("was {}, as the arguments say", parallel(said)));
    }
    for (stack, layers) in description.layers.iter().take(STACKS_MAX) {
        fact("layers", layers_of(stack, layers));
    }
    if description.layers.len() > STACKS_MAX {
        fact("", format!("and {} more stacks", description.layers.len() - STACKS_MAX));
    }
    fact("optimizer", description.optimizer.to_owned());
    let keys: Vec<&str> = description.common.keys().map(String::as_str).collect();
    fact("common", keys.join(", "));
    text.push('\n');
    text
}

fn iteration(description: &Description) -> String {
    let samples = description.consumed_samples.map(|n| format!("{} samples", thousands(n)));
    let iteration = description.iteration.map(thousands);
    iteration.into_iter().chain(samples).collect::<Vec<_>>().join(", ")
}

fn parallel(sizes: &ParallelSizes) -> String {
    let known = [
        ("TP", sizes.tensor),
        ("PP", sizes.pipeline),
        ("EP", sizes.expert),
        ("ETP", sizes.expert_tensor.filter(|size| sizes.tensor != Some(*size))),
        ("CP", sizes.context),
        ("DP", sizes.data),
    ];
    let known = known.into_iter().filter_map(|(name, size)| Some(format!("{name} {}", size?)));
    let ranks = sizes.world.map(|world| count(usize::try_from(world).unwrap_or(0), "rank"));
    known.chain(ranks).collect::<Vec<_>>().join(" · ")
}

fn layers_of(stack: &str, layers: &Layers) -> String {
    let tensors = count(layers.tensors, "tensor");
    match layers.axis {
        Some(axis) => format!("{stack}: {}, on axis {axis} of {tensors}", layers.count),
        None => format!("{stack}: {}, each with tensors of its own, {tensors}", layers.count),
    }
}

/// The same with one entry for all sharded objects of a key.
pub(crate) fn grouped(mut summary: Summary, objects: &IndexMap<String, ObjectGroup>) -> Summary {
    let mut keys: IndexMap<_, KeySummary> = IndexMap::new();
    let mut groups: IndexMap<String, Vec<Value>> = IndexMap::new();
    let mut sizes: IndexMap<String, usize> = IndexMap::new();
    for (fqn, key) in &summary.keys {
        if let (Some((of, _)), KeySummary::Object { .. }) = (object_key(fqn), key) {
            *sizes.entry(of.to_owned()).or_default() += 1;
        }
    }
    for (fqn, key) in summary.keys {
        let of = object_key(&fqn).map(|(of, _)| of.to_owned());
        match (of, plain(key)) {
            (Some(of), KeySummary::Object { value })
                if sizes.get(&of).is_some_and(|stored| *stored >= GROUP_FROM) =>
            {
                let name = format!("{of}/shard_*");
                let values = groups.entry(of).or_default();
                if values.is_empty() {
                    keys.insert(name.into(), KeySummary::Object { value: Value::Null });
                }
                // Only whether they are equal is known.
                if values.len() < 2 && !values.contains(&value) {
                    values.push(value);
                }
            }
            (_, key) => _ = keys.insert(fqn, key),
        }
    }
    for (of, values) in &groups {
        let stored = sizes.get(of).copied().unwrap_or_default();
        let group = objects.get(of);
        let mut text = count(stored, "object");
        if let Some(group) = group {
            let grid: Vec<_> = group.grid.iter().map(ToString::to_string).collect();
            text.push_str(&format!(" on a grid of {}", grid.join("×")));
            if group.bytes > 0 {
                text.push_str(&format!(", {}", size(group.bytes)));
            }
        }
        if let [value] = values.as_slice() {
            text.push_str(&format!(", all {}", python(value, VALUE_MAX)));
        }
        let value = json!({ "type": "note", "text": text });
        keys.insert(format!("{of}/shard_*").into(), KeySummary::Object { value });
    }
    summary.keys = keys;
    summary
}

/// Without the list of one that the format has around every object.
fn plain(mut key: KeySummary) -> KeySummary {
    if let KeySummary::Object { value } = &mut key
        && let Some([item]) = value.as_array().map(Vec::as_slice)
    {
        *value = item.clone();
    }
    key
}

/// The arguments of a run, in alphabetical order.
pub(crate) fn arguments(args: &Map<String, Value>, out: &Output) -> String {
    let mut rows: Vec<_> = args.iter().map(|(name, value)| (name.clone(), value)).collect();
    rows.sort_by(|a, b| a.0.cmp(&b.0));
    table(&rows, out)
}

/// The common state, one line for each value, but for the arguments.
pub(crate) fn common(state: &Map<String, Value>, out: &Output) -> String {
    let mut rows = Vec::new();
    let of_args = state.get("args").map(|args| match plain_dict(args) {
        Some(args) => format!("{}; --args lists them", count(args.len(), "argument")),
        None => python(args, VALUE_MAX),
    });
    let note = of_args.map(|text| json!({ "type": "note", "text": text }));
    for (name, value) in state {
        match (&**name, &note) {
            ("args", Some(note)) => rows.push((name.clone(), note)),
            _ => flatten(name.clone(), value, &mut rows),
        }
    }
    table(&rows, out)
}

/// The entries in the JSON of a dict, or of an object that is one under a name, such as a
/// namespace.
pub(crate) fn plain_dict(value: &Value) -> Option<&Map<String, Value>> {
    let map = value.as_object()?;
    match map.get("type").and_then(Value::as_str) {
        None => Some(map),
        Some(_) => map.get("state").and_then(Value::as_object),
    }
}

fn flatten<'a>(name: String, value: &'a Value, rows: &mut Vec<(String, &'a Value)>) {
    match value {
        Value::Object(map) if !map.contains_key("type") && !map.is_empty() => {
            for (key, value) in map {
                flatten(format!("{name}.{key}"), value, rows);
            }
        }
        value => rows.push((name, value)),
    }
}

fn table(rows: &[(String, &Value)], out: &Output) -> String {
    let longest = rows.iter().map(|(name, _)| columns(name)).max().unwrap_or(0);
    let width = out.width.unwrap_or(usize::MAX);
    let name_width = longest.min((width / 2).max(16));
    let room = width.saturating_sub(name_width + 2).clamp(8, VALUE_MAX);
    let mut text = String::new();
    for (name, value) in rows {
        let name = left(&shorten(&printable(name), name_width), name_width);
        let value = escaped(&python(value, VALUE_MAX)).into_owned();
        let _ = writeln!(text, "{name}  {}", out.style.value(&cut(&value, room)));
    }
    text
}

/// The beginning of a text, with `…` where it was cut.
pub(crate) fn cut(text: &str, width: usize) -> String {
    if columns(text) <= width {
        return text.to_owned();
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    format!("{kept}…")
}
