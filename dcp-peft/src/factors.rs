//! The matrices of products, in memory while tensors are read that need them.

use std::sync::{Arc, Mutex, PoisonError};

use dcp_core::{CheckpointError, CheckpointMetadata, PlanError, Region, StorageReader};
use dcp_jobs::read::TensorReader;

use crate::changes::Product;
use crate::numbers::floats_of;

/// The bytes of matrices that are kept for the next segment of a tensor. A job reads a few tensors at once,
/// each in many segments.
const KEPT_BYTES: usize = 64 << 20;

/// Two matrices whose product has the shape of the stored tensor, row-major.
#[derive(Debug)]
pub(crate) struct Factors {
    /// Rows of the stored tensor × rank.
    pub(crate) left: Vec<f32>,
    /// Rank × columns of the stored tensor.
    pub(crate) right: Vec<f32>,
    /// Of a DoRA, the length of each output's weights after the merge; otherwise empty.
    pub(crate) magnitudes: Vec<f32>,
}

impl Factors {
    fn bytes(&self) -> usize {
        (self.left.len() + self.right.len() + self.magnitudes.len()) * size_of::<f32>()
    }
}

/// Reads factors, and keeps the last ones.
#[derive(Debug)]
pub(crate) struct FactorCache {
    reader: Arc<dyn StorageReader>,
    metadata: Arc<CheckpointMetadata>,
    /// By the position of the first matrix, the last one read at the end.
    kept: Mutex<Vec<(usize, Arc<Factors>)>>,
}

impl FactorCache {
    pub(crate) fn new(reader: Arc<dyn StorageReader>, metadata: Arc<CheckpointMetadata>) -> Self {
        Self { reader, metadata, kept: Mutex::default() }
    }

    /// The factors of `product`. Two readers that miss at the same time both read them.
    pub(crate) async fn get(&self, product: &Product) -> Result<Arc<Factors>, CheckpointError> {
        let known = {
            let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.iter().find(|(at, _)| *at == product.a).map(|(_, factors)| Arc::clone(factors))
        };
        if let Some(factors) = known {
            return Ok(factors);
        }
        let (a, b) = (self.floats(product.a).await?, self.floats(product.b).await?);
        let magnitudes = match product.magnitudes {
            Some(magnitudes) => self.floats(magnitudes).await?,
            None => Vec::new(),
        };
        let rank = usize::try_from(product.rank).unwrap_or(usize::MAX);
        let (left, right) = match product.is_input_first {
            false => (b, a),
            // The transpose of a product is that of the transposes, exchanged.
            true => (transposed(&a, a.len() / rank), transposed(&b, rank)),
        };
        let factors = Arc::new(Factors { left, right, magnitudes });
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(at, _)| *at != product.a);
        kept.push((product.a, Arc::clone(&factors)));
        let mut total: usize = kept.iter().map(|(_, factors)| factors.bytes()).sum();
        while total > KEPT_BYTES && kept.len() > 1 {
            total -= kept.remove(0).1.bytes();
        }
        Ok(factors)
    }

    /// All elements of a tensor of the adapter.
    async fn floats(&self, position: usize) -> Result<Vec<f32>, CheckpointError> {
        let reader =
            TensorReader::new(Arc::clone(&self.reader), Arc::clone(&self.metadata), position)?;
        let tensor = reader.tensor()?;
        let whole = Region::full(tensor.shape.clone())
            .map_err(|error| PlanError::from(error).with_fqn(&**reader.fqn()))?;
        let bytes = reader.read(&[whole]).await?;
        floats_of(reader.fqn(), tensor.dtype, &bytes)
    }
}

/// A row-major matrix of rows with `columns` elements each, transposed.
fn transposed(matrix: &[f32], columns: usize) -> Vec<f32> {
    let rows = matrix.len().checked_div(columns).unwrap_or(0);
    let mut result = Vec::with_capacity(matrix.len());
    for column in 0..columns {
        result.extend((0..rows).filter_map(|row| matrix.get(row * columns + column)));
    }
    result
}
