import { Page } from "../components/Page";

export function Checkpoints() {
  return <Page title="Checkpoints">{null}</Page>;
}
