//! A load into one process.

pub fn load(url: &str) -> Result<dcp::StateDict, Box<dyn std::error::Error>> {
    let rows = dcp::Region::of_ranges([128..384, 0..64])?;
    let weight = dcp::Tensor::zeros_sharded(dcp::DType::Float32, [1024, 64], [rows])?;
    let mut state = dcp::StateDict::from([("weight", weight)]);
    dcp::load(&mut state, url).blocking().map(|_| state).map_err(Into::into)
}
