//! The phases of a save and a load as spans of OpenTelemetry.
//!
//! dcp emits spans of the `tracing` crate: `dcp_save` with `plan`, `write` and `commit`, and
//! `dcp_load` with `read`, with the rank and bytes. An application exports them with the layer and the
//! exporter that it uses for its own spans; this one prints them.
//!
//! ```sh
//! cargo run --package distcp --example opentelemetry
//! ```

use std::error::Error;

use dcp::{Checkpointer, StateDict, Tensor};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

fn main() -> Result<(), Box<dyn Error>> {
    let exporter = opentelemetry_stdout::SpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("trainer"));
    tracing_subscriber::registry().with(layer).init();

    let folder = tempfile::tempdir()?;
    let url = folder.path().join("step-1").display().to_string();
    let mut state = StateDict::new();
    state.insert("weight", Tensor::from_slice(&[1.0_f32, 2.0, 3.0], [3_u64])?);
    let checkpointer = Checkpointer::new();
    checkpointer.save(&state, &url).blocking()?;
    checkpointer.load(&mut state, &url).blocking()?;

    provider.shutdown()?;
    Ok(())
}
