//! The shards of a rank as a message, in columns: no data, a few bytes per shard.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::error::RanksProblem;
use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{DType, Dims, PlanError};

use super::traversal::ShardedLeaf;

/// The sharded leaves of one rank as other ranks need to know them, to check that all together make
/// the tensors and objects.
///
/// Shards of one tensor share one specification, so that on the wire each takes about one byte for
/// every axis.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankShards {
    pub(super) specs: Vec<Spec>,
    /// Numbers of all rows, specification by specification.
    pub(super) numbers: Vec<u64>,
    /// Whether each row is a main replica.
    pub(super) mains: Vec<bool>,
}

/// A tensor or grid of objects and the rows of it that a rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Spec {
    pub(super) key: Arc<str>,
    pub(super) kind: Kind,
    /// Its rows among all of the description.
    pub(super) rows: Range<usize>,
    /// The first of their numbers.
    pub(super) first_number: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// A row is the position in the grid.
    Object { grid: Dims },
    /// A row is the position in the grid, and with `flattened` a range of elements.
    Regular { dtype: DType, shape: Dims, fragments: Dims, sizes: Dims, flattened: bool },
    /// A row is offsets and sizes.
    Irregular { dtype: DType, shape: Dims },
}

impl Kind {
    /// Numbers in a row.
    pub(super) fn width(&self) -> usize {
        match self {
            Self::Object { grid } => grid.ndim(),
            Self::Regular { fragments, flattened, .. } => {
                fragments.ndim() + 2 * usize::from(*flattened)
            }
            Self::Irregular { shape, .. } => 2 * shape.ndim(),
        }
    }
}

/// A tensor or grid of objects, the numbers of its rows, and which are main replicas.
type Column = (Arc<str>, Kind, Vec<u64>, Vec<bool>);

impl RankShards {
    /// Describes leaves, in order.
    ///
    /// Flattened ranges of irregular grids, which no version of Megatron-Core had, are described
    /// by the block they are of.
    pub fn of<'a>(leaves: impl IntoIterator<Item = ShardedLeaf<'a>>) -> Self {
        let mut columns: Vec<Column> = Vec::new();
        let mut known: HashMap<(Arc<str>, Kind), usize> = HashMap::new();
        for leaf in leaves {
            let (key, kind, main) = match leaf {
                ShardedLeaf::Object(object) => {
                    let grid = object.at().grid().clone();
                    (object.key(), Kind::Object { grid }, object.replica_id().is_main())
                }
                ShardedLeaf::Tensor(tensor) => {
                    let (dtype, shape) = (tensor.dtype(), tensor.global_shape().clone());
                    let kind = match tensor.axis_fragmentations() {
                        None => Kind::Irregular { dtype, shape },
                        Some(fragments) => Kind::Regular {
                            dtype,
                            shape,
                            fragments: fragments.clone(),
                            sizes: tensor.region().sizes().clone(),
                            flattened: tensor.flattened_range().is_some(),
                        },
                    };
                    (tensor.key(), kind, tensor.replica_id().is_main())
                }
            };
            let at = *known.entry((Arc::clone(key), kind)).or_insert_with_key(|(key, kind)| {
                columns.push((Arc::clone(key), kind.clone(), Vec::new(), Vec::new()));
                columns.len() - 1
            });
            let Some((_, _, numbers, mains)) = columns.get_mut(at) else { continue };
            mains.push(main);
            push_row(leaf, numbers);
        }
        let mut all = Self::default();
        for (key, kind, numbers, mains) in columns {
            let rows = all.mains.len()..all.mains.len() + mains.len();
            all.specs.push(Spec { key, kind, rows, first_number: all.numbers.len() });
            all.numbers.extend(numbers);
            all.mains.extend(mains);
        }
        all
    }

    /// The number of shards and objects.
    #[must_use]
    pub fn len(&self) -> usize {
        self.mains.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.mains.is_empty()
    }

    /// The keys of all tensors and objects, without the places of objects; some more than once.
    pub fn keys(&self) -> impl Iterator<Item = &Arc<str>> {
        self.specs.iter().map(|spec| &spec.key)
    }

    /// The numbers of a row and whether it is a main replica.
    pub(super) fn rows<'a>(&'a self, spec: &'a Spec) -> impl Iterator<Item = (&'a [u64], bool)> {
        let width = spec.kind.width();
        let mains = self.mains.get(spec.rows.clone()).unwrap_or_default();
        mains.iter().enumerate().filter_map(move |(row, main)| {
            let start = spec.first_number + row * width;
            Some((self.numbers.get(start..start + width)?, *main))
        })
    }
}

fn push_row(leaf: ShardedLeaf<'_>, numbers: &mut Vec<u64>) {
    match leaf {
        ShardedLeaf::Object(object) => numbers.extend_from_slice(object.at().offset()),
        ShardedLeaf::Tensor(tensor) => match tensor.chunk_coordinate() {
            Some(coordinate) => {
                numbers.extend_from_slice(&coordinate);
                let range = tensor.flattened_range();
                numbers.extend(range.into_iter().flat_map(|range| [range.start, range.end]));
            }
            None => {
                numbers.extend_from_slice(tensor.region().offsets());
                numbers.extend_from_slice(tensor.region().sizes());
            }
        },
    }
}

const MAGIC: [u8; 4] = *b"msd1";

impl RankShards {
    /// The description as a message.
    #[must_use]
    pub fn to_wire(&self) -> Bytes {
        let mut out = MessageWriter::new(MAGIC);
        out.number(self.specs.len() as u64);
        for spec in &self.specs {
            out.text(&spec.key);
            send_kind(&mut out, &spec.kind);
            out.number(spec.rows.len() as u64);
        }
        out.numbers(&self.numbers);
        out.flags(&self.mains);
        out.finish()
    }

    /// The description of a message.
    ///
    /// # Errors
    ///
    /// When the bytes are no description of this version.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, PlanError> {
        Self::receive(bytes).map_err(|error| match error {
            PlanError::Ranks(RanksProblem::Message { problem, .. }) => broken(problem),
            other => other,
        })
    }

    fn receive(bytes: &[u8]) -> Result<Self, PlanError> {
        let mut input = MessageReader::new(bytes, MAGIC)?;
        let mut all = Self::default();
        let (mut rows, mut width) = (0_usize, 0_usize);
        for _ in 0..input.count()? {
            let key = input.text()?.into();
            let kind = kind(&mut input)?;
            // A row without numbers still takes a bit.
            let count = usize::try_from(input.number()?).ok();
            let count = count.filter(|count| count / 8 <= input.remaining());
            let count = count.ok_or_else(|| broken("more rows than bytes"))?;
            let first_number = width;
            let end = rows.checked_add(count).ok_or_else(|| broken("too many rows"))?;
            width = count
                .checked_mul(kind.width())
                .and_then(|numbers| numbers.checked_add(width))
                .filter(|numbers| *numbers <= input.remaining())
                .ok_or_else(|| broken("more numbers than bytes"))?;
            all.specs.push(Spec { key, kind, rows: rows..end, first_number });
            rows = end;
        }
        all.numbers.reserve_exact(width.min(input.remaining()));
        for _ in 0..width {
            all.numbers.push(input.number()?);
        }
        all.mains = input.flags(rows)?;
        input.finish()?;
        Ok(all)
    }
}

fn broken(problem: impl Into<String>) -> PlanError {
    PlanError::message("a rank's description of its shards", problem)
}

fn send_kind(out: &mut MessageWriter, kind: &Kind) {
    match kind {
        Kind::Object { grid } => {
            out.number(0);
            out.dims(grid);
        }
        Kind::Regular { dtype, shape, fragments, sizes, flattened } => {
            out.number(1 + u64::from(*flattened));
            out.dtype(*dtype);
            out.dims(shape);
            out.numbers(fragments);
            out.numbers(sizes);
        }
        Kind::Irregular { dtype, shape } => {
            out.number(3);
            out.dtype(*dtype);
            out.dims(shape);
        }
    }
}

fn kind(input: &mut MessageReader<'_>) -> Result<Kind, PlanError> {
    Ok(match input.number()? {
        0 => Kind::Object { grid: input.dims()? },
        tag @ (1 | 2) => {
            let (dtype, shape) = (input.dtype()?, input.dims()?);
            let fragments = input.numbers(shape.ndim())?;
            let sizes = input.numbers(shape.ndim())?;
            Kind::Regular { dtype, shape, fragments, sizes, flattened: tag == 2 }
        }
        3 => Kind::Irregular { dtype: input.dtype()?, shape: input.dims()? },
        _ => return Err(broken("an unknown kind of shard")),
    })
}
