//! A conversion.

pub async fn convert(from: &str, to: &str) -> Result<(), dcp::jobs::Error> {
    dcp::open(from).await?.convert(to).to(dcp::Format::HuggingFace).run().await.map(drop)
}
