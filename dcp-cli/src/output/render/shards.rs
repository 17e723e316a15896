//! The shard map: how the chunks of one tensor lie in it, and which file holds each.

use std::fmt::Write as _;

use dcp::jobs::inspect::{ChunkSummary, TensorSummary};

use crate::output::Output;
use crate::output::render::grid;
use crate::output::render::grid::{Axis, Plane};
use crate::output::style::{columns, count, left, printable, right, shorten, size, thousands};

/// Slices of a tensor with more than two cut axes that are drawn at most.
const SLICES: usize = 6;
/// Chunks that are listed at most.
const LISTED: usize = 256;

pub(crate) fn render(fqn: &str, tensor: &TensorSummary, out: &Output) -> String {
    let style = out.style;
    let mut files: Vec<&str> = Vec::new();
    let hues: Vec<usize> = tensor
        .chunks
        .iter()
        .map(|chunk| {
            let name = chunk.file.as_deref().unwrap_or("");
            files.iter().position(|known| *known == name).unwrap_or_else(|| {
                files.push(name);
                files.len() - 1
            })
        })
        .collect();
    let mut text = format!(
        "{}\n{}\n",
        style.bold(&printable(fqn)),
        style.dim(&format!(
            "{} {:?} · {} · {} in {}",
            tensor.dtype,
            tensor.shape,
            size(tensor.bytes),
            count(tensor.chunks.len(), "chunk"),
            count(files.len(), "file"),
        ))
    );
    text.push_str(&picture(tensor, &hues, out));
    text.push_str(&list(tensor, &hues, out));
    text
}

/// The axes along which the tensor is cut, and the places of the cuts.
fn cut_axes(tensor: &TensorSummary) -> Vec<Axis> {
    (0..tensor.shape.len())
        .map(|axis| Axis::new(axis, tensor))
        .filter(|axis| axis.parts() > 1)
        .collect()
}

fn picture(tensor: &TensorSummary, hues: &[usize], out: &Output) -> String {
    if tensor.shape.is_empty() || tensor.shape.contains(&0) {
        // No extent, nothing to draw.
        return "\n".to_owned();
    }
    let mut axes = cut_axes(tensor);
    // The first axes run down, the last one to the right; a tensor that is cut along fewer than
    // two axes is filled up with whole ones.
    let last = tensor.shape.len() - 1;
    for axis in [0, last] {
        if axes.len() < 2 && axes.iter().all(|known| known.index != axis) {
            axes.push(Axis::new(axis, tensor));
        }
    }
    axes.sort_by_key(|axis| axis.index);
    let (outer, inner) = axes.split_at(axes.len().saturating_sub(2));
    let (rows, across) = match inner {
        [across] => (None, across),
        [rows, across] => (Some(rows), across),
        _ => return "\n".to_owned(),
    };
    let mut text = String::new();
    let total: usize = outer.iter().map(Axis::parts).product();
    for slice in 0..total.min(SLICES) {
        // Which part of each outer axis this slice shows, the last one counting fastest.
        let mut number = slice;
        let mut fixed = Vec::new();
        for axis in outer.iter().rev() {
            fixed.push((axis.index, axis.part(number % axis.parts())));
            number /= axis.parts();
        }
        fixed.reverse();
        let title = plane_title(tensor, rows, across, &fixed);
        let _ = writeln!(text, "\n{}", out.style.dim(&title));
        let inside = |chunk: &ChunkSummary| {
            fixed.iter().all(|(axis, (start, _))| {
                let offset = chunk.offsets.get(*axis).copied().unwrap_or(0);
                let size = chunk.sizes.get(*axis).copied().unwrap_or(0);
                offset <= *start && *start - offset < size
            })
        };
        let shown: Vec<_> = tensor
            .chunks
            .iter()
            .enumerate()
            .filter(|(_, chunk)| !chunk.sizes.contains(&0) && inside(chunk))
            .map(|(index, chunk)| (index, chunk, hues.get(index).copied().unwrap_or(0)))
            .collect();
        let width = out.width.unwrap_or(100).min(100);
        match (Plane { rows, across, width }).draw(&shown) {
            Some(rows) => {
                for row in rows.rows(|hue, text| out.style.hue(hue, text)) {
                    let _ = writeln!(text, "{row}");
                }
            }
            None => {
                let _ = writeln!(text, "  too many chunks to be drawn in {width} columns");
            }
        }
    }
    if total > SLICES {
        let _ = writeln!(text, "\n{}", out.style.dim(&format!("… {} more slices", total - SLICES)));
    }
    text.push('\n');
    text
}

/// Which axis runs where, and what part of the others is shown.
fn plane_title(
    tensor: &TensorSummary,
    rows: Option<&Axis>,
    across: &Axis,
    fixed: &[(usize, (u64, u64))],
) -> String {
    let mut parts: Vec<String> = Vec::new();
    if let Some(rows) = rows {
        parts.push(format!("axis {} ↓", rows.index));
    }
    parts.push(format!("axis {} →", across.index));
    for axis in 0..tensor.shape.len() {
        if let Some((_, (start, end))) = fixed.iter().find(|(fixed, _)| *fixed == axis) {
            parts.push(format!("axis {axis} at {start}:{end}"));
        } else if axis != across.index && rows.is_none_or(|rows| rows.index != axis) {
            parts.push(format!("axis {axis} whole"));
        }
    }
    parts.join(", ")
}

fn list(tensor: &TensorSummary, hues: &[usize], out: &Output) -> String {
    let style = out.style;
    let place = |chunk: &ChunkSummary| {
        let axes = chunk.offsets.iter().zip(&chunk.sizes);
        let ranges: Vec<_> =
            axes.map(|(start, len)| format!("{start}:{}", start.saturating_add(*len))).collect();
        format!("[{}]", ranges.join(", "))
    };
    let shown = || tensor.chunks.iter().take(LISTED);
    let places: Vec<_> = shown().map(place).collect();
    let wide = places.iter().map(|place| columns(place)).max().unwrap_or(0);
    let numbers = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), thousands);
    let offset = shown().map(|c| numbers(c.byte_offset).len()).max().unwrap_or(0);
    let stored = shown().map(|c| numbers(c.byte_len).len()).max().unwrap_or(0);
    let file_name = |file: &str| shorten(&printable(file), 40);
    let names = shown().map(|c| c.file.as_deref().map_or(7, |file| columns(&file_name(file))));
    let names = names.max().unwrap_or(0);
    let label = grid::label(tensor.chunks.len().saturating_sub(1)).len();
    let mut text = String::new();
    for (index, (chunk, place)) in shown().zip(&places).enumerate() {
        let hue = hues.get(index).copied().unwrap_or(0);
        let name = style.hue(hue, &left(&grid::label(index), label));
        let file = match &chunk.file {
            Some(file) => style.hue(hue, &left(&file_name(file), names)),
            None => style.bad(&left("nowhere", names)),
        };
        let at = right(&numbers(chunk.byte_offset), offset);
        let len = right(&numbers(chunk.byte_len), stored);
        let empty = if chunk.sizes.contains(&0) { style.dim("  empty") } else { String::new() };
        let bytes = style.dim(&format!("{len} bytes at {at}"));
        let place = left(place, wide);
        let _ = writeln!(text, "  {name}  {place}  {file}  {bytes}{empty}");
    }
    if tensor.chunks.len() > LISTED {
        let more = tensor.chunks.len() - LISTED;
        let _ = writeln!(text, "  {}", style.dim(&format!("… {more} more; --json has all")));
    }
    text
}
