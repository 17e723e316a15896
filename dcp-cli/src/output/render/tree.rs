//! The tree of a checkpoint: names nested as the state dict was, with what each holds.

use std::fmt::Write as _;

use dcp::core::text::escaped;
use dcp::jobs::inspect::{KeySummary, Summary, TensorSummary};

use crate::output::Output;
use crate::output::render::files;
use crate::output::render::megatron::cut;
use crate::output::render::nest::{Node, nest};
use crate::output::render::value::python;
use crate::output::style::{columns, count, left, printable, right, shorten, size};

/// Layers that are alike are shown as one from this many on.
const FOLD_FROM: usize = 3;
/// Columns between two columns of the table.
const GAP: usize = 2;
/// Bytes of a value that are shown, however wide the terminal is.
const VALUE_MAX: usize = 160;
/// The least that a file's name is worth showing in.
const FILE_MIN: usize = 5;
/// What a name gets before the number of shards gets anything.
const NAME_WANTED: usize = 28;
/// What a name gets in any case.
const NAME_MIN: usize = 12;

/// The tree; `facts` come between its title and its lines.
pub(crate) fn render(uri: &str, summary: &Summary, facts: &str, all: bool, out: &Output) -> String {
    let mut rows = Vec::new();
    let root = nest(summary);
    let fold = if all { usize::MAX } else { FOLD_FROM };
    let mut walk = Walk { summary, fold, rows: &mut rows };
    for child in &root.children {
        walk.node(child, "", "", "");
    }
    let mut text = title(uri, summary, out);
    text.push_str(facts);
    text.push_str(&table(&rows, out));
    text.push_str(&files::render(summary, out));
    text
}

fn title(uri: &str, summary: &Summary, out: &Output) -> String {
    let tensors = summary.tensor_count();
    let objects = summary.keys.len() - tensors;
    let version =
        summary.version.as_ref().map_or_else(String::new, |version| format!(" {version}"));
    let parts = [
        format!("{}{version}", summary.format),
        format!("{}, {}", count(tensors, "tensor"), size(summary.tensor_bytes())),
        count(objects, "object"),
        count(summary.files.len(), "file"),
    ];
    let mut lines = vec![String::new()];
    for part in parts {
        let width = out.width.unwrap_or(usize::MAX);
        match lines.last_mut() {
            Some(line) if line.is_empty() => *line = part,
            Some(line) if columns(line) + columns(&part) + 3 <= width => {
                line.push_str(" · ");
                line.push_str(&part);
            }
            _ => lines.push(part),
        }
    }
    if let Some(sidecar) = &summary.sidecar {
        lines.push(printable(&sidecar.to_string()));
    }
    let lines: Vec<_> = lines.iter().map(|line| out.style.dim(line)).collect();
    format!("{}\n{}\n\n", out.style.bold(&printable(uri)), lines.join("\n"))
}

/// One line of the table.
struct Row {
    /// The branches that lead to it.
    branches: String,
    name: String,
    /// How many equal entries it shows, when more than one.
    times: usize,
    cells: Cells,
}

enum Cells {
    /// A name with others below it, and the bytes of all.
    Group {
        bytes: u64,
    },
    Tensor {
        dtype: &'static str,
        shape: String,
        bytes: u64,
        shards: usize,
        files: String,
    },
    Object {
        value: String,
    },
}

struct Walk<'a> {
    summary: &'a Summary,
    fold: usize,
    rows: &'a mut Vec<Row>,
}

impl Walk<'_> {
    /// Adds `node`, whose line begins with `here`, and those below, whose lines begin with
    /// `below`.
    fn node(&mut self, node: &Node, here: &str, below: &str, label: &str) {
        self.times(node, here, below, label, 1);
    }

    fn times(&mut self, node: &Node, here: &str, below: &str, label: &str, times: usize) {
        // A name with a single one below it shares its line.
        let mut name = if label.is_empty() { printable(&node.name) } else { label.to_owned() };
        if name.is_empty() {
            name = "\"\"".to_owned();
        }
        let mut node = node;
        while let ([only], None) = (&*node.children, node.key) {
            name = format!("{name}.{}", printable(&only.name));
            node = only;
        }
        let cells = match node.key.and_then(|key| self.summary.keys.get_index(key)) {
            Some((_, key)) => cells(key),
            None => {
                let bytes = node.bytes.saturating_mul(times as u64);
                Cells::Group { bytes }
            }
        };
        self.rows.push(Row { branches: here.to_owned(), name, times, cells });
        let mut children = node.children.iter().peekable();
        while let Some(child) = children.next() {
            let mut alike = 1;
            let mut end = child;
            if child.is_numbered() {
                let mut ahead = children.clone();
                while let Some(next) = ahead.next_if(|next| next.follows(end)) {
                    alike += 1;
                    end = next;
                }
            }
            if alike < self.fold {
                alike = 1;
            }
            children.by_ref().take(alike - 1).for_each(drop);
            let last = children.peek().is_none();
            let (branch, stem) = if last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            let (here, stem) = (format!("{below}{branch}"), format!("{below}{stem}"));
            let label =
                if alike > 1 { format!("{}…{}", child.name, end.name) } else { String::new() };
            self.times(child, &here, &stem, &label, alike);
        }
    }
}

fn cells(key: &KeySummary) -> Cells {
    match key {
        KeySummary::Tensor(tensor) => Cells::Tensor {
            dtype: tensor.dtype,
            shape: format!("{:?}", tensor.shape),
            bytes: tensor.bytes,
            shards: tensor.chunks.len(),
            files: files_of(tensor),
        },
        KeySummary::Object { value } => Cells::Object { value: python(value, VALUE_MAX) },
        _ => Cells::Object { value: String::new() },
    }
}

/// The files a tensor is in, or the first and the last of many.
fn files_of(tensor: &TensorSummary) -> String {
    let mut names: Vec<&str> = Vec::new();
    for chunk in &tensor.chunks {
        let name = chunk.file.as_deref().unwrap_or("nowhere");
        if names.last() != Some(&name) && !names.contains(&name) {
            names.push(name);
        }
    }
    let stem = |name: &str| printable(name.strip_suffix(".distcp").unwrap_or(name));
    match &*names {
        [] => String::new(),
        [one] => stem(one),
        [one, two] => format!("{} {}", stem(one), stem(two)),
        [first, .., last] => format!("{} … {}", stem(first), stem(last)),
    }
}

fn table(rows: &[Row], out: &Output) -> String {
    let style = out.style;
    let widest = |cell: &dyn Fn(&Row) -> usize| rows.iter().map(cell).max().unwrap_or(0);
    let tensor = |row: &Row, pick: &dyn Fn(&str, &str, &str, &str) -> usize| match &row.cells {
        Cells::Tensor { dtype, shape, bytes, shards, .. } => {
            pick(dtype, shape, &size(*bytes), &count(*shards, "shard"))
        }
        Cells::Group { bytes } => pick("", "", &size(*bytes), ""),
        Cells::Object { .. } => 0,
    };
    let name_of = |row: &Row| match row.times {
        1 => row.name.clone(),
        times => format!("{} ×{times}", row.name),
    };
    let mut name = widest(&|row| columns(&row.branches) + columns(&name_of(row)));
    let dtype = widest(&|row| tensor(row, &|dtype, _, _, _| dtype.len()));
    let shape = widest(&|row| tensor(row, &|_, shape, _, _| shape.len()));
    let bytes = widest(&|row| tensor(row, &|_, _, bytes, _| bytes.len()));
    let mut shards = widest(&|row| tensor(row, &|_, _, _, shards| shards.len()));
    let mut fixed = dtype + shape + bytes + shards + 4 * GAP;
    if out.width.is_some_and(|width| width < fixed + name.min(NAME_WANTED)) {
        // The number of shards is what a narrow terminal can do without.
        fixed -= shards + GAP;
        shards = 0;
    }
    if let Some(width) = out.width {
        name = name.min(width.saturating_sub(fixed).max(NAME_MIN));
    }
    // What is left of the line, if it ends.
    let rest = |used: usize| out.width.map_or(usize::MAX, |width| width.saturating_sub(used));
    let mut text = String::new();
    for row in rows {
        let room = name.saturating_sub(columns(&row.branches));
        let shown = shorten(&name_of(row), room);
        let pad = " ".repeat(room.saturating_sub(columns(&shown)));
        let branches = style.dim(&row.branches);
        let line = match &row.cells {
            Cells::Group { bytes: total } => {
                // Without tensors below there is nothing to say.
                let total = if *total == 0 { String::new() } else { size(*total) };
                let total = right(&total, bytes);
                let indent = " ".repeat(GAP + dtype + GAP + shape + GAP);
                format!("{branches}{}{pad}{indent}{}", style.bold(&shown), style.dim(&total))
            }
            Cells::Tensor { dtype: kind, shape: sizes, bytes: len, shards: n, files } => {
                let mut n = left(&count(*n, "shard"), shards);
                if shards == 0 {
                    n.clear();
                }
                let room = rest(name + fixed);
                let files = if room < FILE_MIN { String::new() } else { shorten(files, room) };
                let kind = style.dtype(&left(kind, dtype));
                let (sizes, len) = (left(sizes, shape), right(&size(*len), bytes));
                format!(
                    "{branches}{shown}{pad}  {kind}  {sizes}  {len}  {}  {}",
                    style.dim(&n),
                    style.dim(&files)
                )
            }
            Cells::Object { value } => {
                let value = cut(&escaped(value), rest(name + GAP));
                format!("{branches}{shown}{pad}  {}", style.value(&value))
            }
        };
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}
