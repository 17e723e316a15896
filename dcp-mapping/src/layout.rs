//! The geometry of each operation: which elements of a Megatron tensor are which of its Hugging
//! Face tensors.
//!
//! A layout holds pairs of boxes of equal size, so it reads in both directions. What of a Megatron
//! tensor is in no pair is padding.

use dcp_core::{Dims, Region};

use crate::facts::Facts;

/// The operation of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// A copy of the elements.
    Copy,
    /// Query, key and value, in Megatron interleaved by query group. In Hugging Face they are
    /// three tensors, or one that has them one after the other.
    Qkv,
    /// The Hugging Face tensors one after the other along an axis.
    Concat { axis: usize, sizes: Option<Vec<Size>> },
    /// One row for each token, in Megatron with rows added to make it divisible.
    Vocab,
    /// The rows of each head in pairs that a position turns together: neighbors on the other side, and
    /// in Hugging Face the first of all pairs and then the second.
    Rotary(Heads),
}

/// The projection whose heads the rows are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heads {
    Query,
    Key,
}

/// The length of a part along an axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    /// The product of numbers and facts.
    Product(Vec<Factor>),
    /// The length that the other parts leave.
    Rest,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Factor {
    Number(u64),
    Fact(String),
}

impl Size {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if text == "rest" {
            return Ok(Self::Rest);
        }
        let factor = |factor: &str| {
            let factor = factor.trim();
            let is_name = factor.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
            match factor.parse() {
                Ok(number) => Ok(Factor::Number(number)),
                Err(_) if is_name && !factor.is_empty() => Ok(Factor::Fact(factor.to_owned())),
                Err(_) => {
                    Err(format!("{text:?} is not a size such as \"kv_channels\" or \"2*head\""))
                }
            }
        };
        text.split('*').map(factor).collect::<Result<_, _>>().map(Self::Product)
    }
}

/// The shapes on both sides of a rule, without stacked axes, and which box is which.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) megatron: Dims,
    pub(crate) hf: Vec<Dims>,
    pub(crate) links: Vec<Link>,
    /// The box of the Megatron tensor that is in no Hugging Face tensor.
    pub(crate) padding: Option<Region>,
}

/// A box of a Hugging Face tensor and the box of the Megatron tensor that it is.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(crate) part: usize,
    pub(crate) hf: Region,
    pub(crate) megatron: Region,
}

/// The side that there is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Known<'a> {
    Megatron(&'a [u64]),
    Hf(&'a [&'a [u64]]),
}

/// Rows of one part: where they begin in it, and in the Megatron tensor, and how many they are.
struct Run {
    part: usize,
    from: u64,
    to: u64,
    len: u64,
}

/// The division of a tensor by one rule.
struct Division {
    axis: usize,
    parts: Vec<u64>,
    whole: u64,
    runs: Vec<Run>,
}

impl Op {
    /// Works out the side that is not `known`. `parts` is the number of Hugging Face tensors;
    /// with `transpose`, their last two axes are swapped.
    pub(crate) fn layout(
        &self,
        known: Known<'_>,
        parts: usize,
        transpose: bool,
        facts: &Facts,
    ) -> Result<Layout, String> {
        let plain = |shape: &[u64]| -> Result<Dims, String> {
            let mut dims = Dims::from(shape);
            if transpose {
                swap_last(&mut dims)?;
            }
            Ok(dims)
        };
        let (division, like) = match known {
            Known::Megatron(shape) => (self.divide(shape, None, parts, facts)?, Dims::from(shape)),
            Known::Hf(shapes) => {
                let shapes = shapes.iter().map(|s| plain(s)).collect::<Result<Vec<_>, _>>()?;
                let first = shapes.first().ok_or("has no parts")?;
                (self.divide(first, Some(&shapes), parts, facts)?, first.clone())
            }
        };
        division.layout(&like, transpose)
    }

    /// `shape` is that of the Megatron tensor, or of the first part with several `shapes`.
    fn divide(
        &self,
        shape: &[u64],
        shapes: Option<&[Dims]>,
        parts: usize,
        facts: &Facts,
    ) -> Result<Division, String> {
        let axis = if let Op::Concat { axis, .. } = self { *axis } else { 0 };
        if *self == Op::Copy {
            let len = shape.first().copied().unwrap_or(1);
            return Ok(Division::one(len, len, len));
        }
        let len = *shape
            .get(axis)
            .ok_or_else(|| format!("a tensor of shape {} has no axis {axis}", Dims::from(shape)))?;
        let lens = shapes.map(|shapes| same_but(shapes, axis)).transpose()?;
        match self {
            Op::Copy => Ok(Division::one(len, len, len)),
            Op::Qkv => qkv(len, lens.as_deref(), parts, facts),
            Op::Rotary(heads) => rotary(len, *heads, facts),
            Op::Concat { sizes, .. } => {
                let total = lens.as_ref().map_or(Some(len), |lens| sum(lens));
                let total = total.ok_or("is too large")?;
                let expected = match sizes {
                    None => equal_parts(total, parts),
                    Some(sizes) => sized_parts(total, sizes, facts),
                };
                // What is joined otherwise would come apart otherwise, too.
                let lens = match lens {
                    Some(lens) if expected.as_ref() != Ok(&lens) => {
                        let (lens, expected) = (Dims::from(lens), expected.map(Dims::from));
                        let expected = expected.map_or_else(|why| why, |e| format!("not {e}"));
                        return Err(format!("the parts have {lens} along axis {axis}, {expected}"));
                    }
                    _ => expected?,
                };
                let (mut runs, mut to) = (Vec::with_capacity(lens.len()), 0_u64);
                for (part, &len) in lens.iter().enumerate() {
                    runs.push(Run { part, from: 0, to, len });
                    to = to.checked_add(len).ok_or("is too large")?;
                }
                Ok(Division { axis, parts: lens, whole: to, runs })
            }
            Op::Vocab => match lens {
                None => {
                    let tokens = facts.vocab_size().map_err(|e| e.to_string())?.unwrap_or(len);
                    if tokens > len {
                        return Err(format!(
                            "it has {len} rows, fewer than the vocabulary of {tokens} tokens"
                        ));
                    }
                    Ok(Division::one(tokens, len, tokens))
                }
                Some(_) => {
                    let padded = facts.padded_vocab_size(len).map_err(|e| e.to_string())?;
                    if padded < len {
                        return Err(format!(
                            "it has {len} rows, more than the padded vocabulary of {padded}"
                        ));
                    }
                    Ok(Division::one(len, padded, len))
                }
            },
        }
    }
}

impl Division {
    fn one(part: u64, whole: u64, len: u64) -> Self {
        Self { axis: 0, parts: vec![part], whole, runs: vec![Run { part: 0, from: 0, to: 0, len }] }
    }

    fn layout(&self, like: &Dims, transpose: bool) -> Result<Layout, String> {
        let with = |len: u64| {
            let mut dims = like.clone();
            if let Some(slot) = dims.get_mut(self.axis) {
                *slot = len;
            }
            dims
        };
        let region = |at: u64, len: u64, swap: bool| {
            let (mut offsets, mut sizes) = (Dims::zeros(like.ndim()), with(len));
            if let Some(slot) = offsets.get_mut(self.axis) {
                *slot = at;
            }
            if swap {
                swap_last(&mut offsets)?;
                swap_last(&mut sizes)?;
            }
            Region::new(offsets, sizes).map_err(|error| error.to_string())
        };
        let mut hf = Vec::with_capacity(self.parts.len());
        for &len in &self.parts {
            let mut dims = with(len);
            if transpose {
                swap_last(&mut dims)?;
            }
            hf.push(dims);
        }
        let mut links = Vec::with_capacity(self.runs.len());
        for run in &self.runs {
            links.push(Link {
                part: run.part,
                hf: region(run.from, run.len, transpose)?,
                megatron: region(run.to, run.len, false)?,
            });
        }
        let covered = self.runs.iter().map(|run| run.to + run.len).max().unwrap_or(0);
        let padding = match self.whole.checked_sub(covered) {
            Some(0) | None => None,
            Some(rows) => Some(region(covered, rows, false)?),
        };
        Ok(Layout { megatron: with(self.whole), hf, links, padding })
    }
}

fn swap_last(dims: &mut Dims) -> Result<(), String> {
    let axes = dims.ndim();
    if axes < 2 {
        return Err(format!("a tensor of shape {dims} has no two axes to transpose"));
    }
    dims.swap(axes - 2, axes - 1);
    Ok(())
}

/// The lengths along an axis of tensors that are the same along all others.
fn same_but(shapes: &[Dims], axis: usize) -> Result<Vec<u64>, String> {
    let rest = |dims: &Dims| {
        dims.iter().enumerate().filter(|(i, _)| *i != axis).map(|(_, n)| *n).collect::<Vec<_>>()
    };
    let first = shapes.first().map(rest);
    if let Some(other) = shapes.iter().find(|s| Some(rest(s)) != first || s.ndim() <= axis) {
        let first = shapes.first().map_or_else(String::new, ToString::to_string);
        return Err(format!(
            "tensors of shapes {first} and {other} cannot be joined along axis {axis}"
        ));
    }
    Ok(shapes.iter().filter_map(|s| s.get(axis).copied()).collect())
}

fn sum(lens: &[u64]) -> Option<u64> {
    lens.iter().try_fold(0, |sum: u64, len| sum.checked_add(*len))
}

fn equal_parts(len: u64, parts: usize) -> Result<Vec<u64>, String> {
    let count = parts as u64;
    match len.checked_rem(count) {
        Some(0) => Ok(vec![len / count; parts]),
        _ => Err(format!("{len} rows cannot be divided into {parts} equal parts")),
    }
}

fn sized_parts(len: u64, sizes: &[Size], facts: &Facts) -> Result<Vec<u64>, String> {
    let mut lens = Vec::with_capacity(sizes.len());
    for size in sizes {
        lens.push(match size {
            Size::Rest => None,
            Size::Product(factors) => {
                let mut product = 1_u64;
                for factor in factors {
                    let factor = match factor {
                        Factor::Number(number) => *number,
                        Factor::Fact(name) => facts.need(name, "a part's size")?,
                    };
                    product = product.checked_mul(factor).ok_or("a part is too large")?;
                }
                Some(product)
            }
        });
    }
    let sum = lens.iter().flatten().try_fold(0_u64, |sum, len| sum.checked_add(*len));
    let rest = sum.and_then(|sum| len.checked_sub(sum));
    let has_rest = lens.contains(&None);
    match rest {
        Some(rest) if has_rest || rest == 0 => {
            Ok(lens.into_iter().map(|len| len.unwrap_or(rest)).collect())
        }
        _ => {
            let parts = lens.iter().map(|l| l.map_or_else(|| "rest".to_owned(), |l| l.to_string()));
            let parts = parts.collect::<Vec<_>>().join(" + ");
            Err(format!("{len} rows are not {parts}"))
        }
    }
}

/// Rows of query, key and value; in Megatron the query rows of a group, then its key's, then its
/// value's. `lens` are the rows of the Hugging Face tensors, `len` those of the Megatron tensor
/// where there are none.
fn qkv(len: u64, lens: Option<&[u64]>, parts: usize, facts: &Facts) -> Result<Division, String> {
    let heads = facts.need("num_attention_heads", "query, key and value")?;
    let groups = facts.query_groups(heads).map_err(|e| e.to_string())?;
    let all = groups.checked_mul(2).and_then(|kv| kv.checked_add(heads));
    let all = all.ok_or("there are too many heads")?;
    let total = match lens {
        None => len,
        Some(lens) => sum(lens).ok_or("there are too many rows")?,
    };
    let what = format!("{heads} heads in {groups} query groups");
    let head = match total.checked_rem(all) {
        Some(0) => total / all,
        _ => return Err(format!("{total} rows are not those of {what}")),
    };
    if let Some(known) = facts.get_u64("kv_channels").map_err(|e| e.to_string())?
        && known != head
    {
        let expected = known.saturating_mul(all);
        return Err(format!(
            "it has {total} rows, but {what} of {known} channels (kv_channels) have {expected}"
        ));
    }
    let per_group = match heads.checked_rem(groups) {
        Some(0) => heads / groups,
        _ => return Err(format!("{heads} heads cannot be divided into {groups} query groups")),
    };
    // All are parts of `total`, so they cannot overflow.
    let rows = [heads * head, groups * head, groups * head];
    if let Some(lens) = lens
        && parts == rows.len()
        && lens != rows
    {
        let lens = Dims::from(lens);
        return Err(format!("query, key and value have {lens} rows, which are not {what}"));
    }
    let joined = parts == 1;
    let (begins, parts) = if joined {
        ([0, rows[0], rows[0] + rows[1]], vec![total])
    } else {
        ([0; 3], rows.to_vec())
    };
    let mut runs = Vec::new();
    if groups > crate::template::NUMBER_MAX {
        return Err(format!("there are {groups} query groups, too many"));
    }
    for group in 0..groups {
        let to = group * (per_group + 2) * head;
        let lens = [per_group * head, head, head];
        let mut at = to;
        for (part, (len, begin)) in lens.into_iter().zip(begins).enumerate() {
            let from = begin + group * len;
            runs.push(Run { part: if joined { 0 } else { part }, from, to: at, len });
            at += len;
        }
    }
    Ok(Division { axis: 0, parts, whole: total, runs })
}

/// Rows of query or key whose neighbors turn together, as complex numbers. With `H` rows in a head, row
/// `2 * i + part` of a head is row `part * H / 2 + i` of it in Hugging Face, where the rows of the two
/// halves turn together (`rotate_half`). So scores of query and key, which are sums over the rows of a
/// head, are the same, as both are reordered alike.
fn rotary(len: u64, heads: Heads, facts: &Facts) -> Result<Division, String> {
    let query = facts.need("num_attention_heads", "the rows of query and key")?;
    let count = match heads {
        Heads::Query => query,
        Heads::Key => facts.query_groups(query).map_err(|error| error.to_string())?,
    };
    let head = match len.checked_rem(count) {
        Some(0) => len / count,
        _ => return Err(format!("{len} rows are not those of {count} heads")),
    };
    if let Some(known) = facts.get_u64("kv_channels").map_err(|error| error.to_string())?
        && known != head
    {
        return Err(format!(
            "it has {len} rows, {head} for each of {count} heads, which have {known} channels"
        ));
    }
    if !head.is_multiple_of(2) {
        return Err(format!("a head of {head} rows has no pairs that turn together"));
    }
    // Each row is a piece of its own.
    if len > crate::template::NUMBER_MAX {
        return Err(format!("there are {len} rows, too many"));
    }
    let half = head / 2;
    let mut runs = Vec::new();
    for first in (0..len).step_by(usize::try_from(head.max(1)).unwrap_or(usize::MAX)) {
        for (from, to) in (0..half).flat_map(|i| [(i, 2 * i), (half + i, 2 * i + 1)]) {
            runs.push(Run { part: 0, from: first + from, to: first + to, len: 1 });
        }
    }
    Ok(Division { axis: 0, parts: vec![len], whole: len, runs })
}
