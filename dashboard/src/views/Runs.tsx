import { Page } from "../components/Page";

export function Runs() {
  return <Page title="Runs">{null}</Page>;
}
