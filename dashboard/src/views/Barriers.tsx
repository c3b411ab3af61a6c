import { Page } from "../components/Page";

export function Barriers() {
  return <Page title="Barriers">{null}</Page>;
}
